"""Where texts end that grow together, against a loop over each."""

from __future__ import annotations

import random

from sglang_parse.requests.ends import TextEnds


def test_ends_equal_a_loop_over_each_text():
    """Red if a text goes on behind a token that ends it or behind its longest length,
    or ends for a token of another text; or if that depends on how often one looks."""
    rng = random.Random(3)
    for _ in range(200):
        bs = rng.randint(1, 4)
        most = [rng.randint(1, 12) for _ in range(bs)]
        stops = [frozenset(rng.sample(range(20), rng.randint(0, 3))) for _ in most]
        texts = [[rng.randrange(20) for _ in range(12)] for _ in most]
        steps = [list(step) for step in zip(*texts, strict=True)]
        ends, num = TextEnds(most, stops), 0
        while num < len(steps):
            num = min(len(steps), num + rng.randint(1, 4))
            ends.see(steps[:num])
            for k, text in enumerate(texts):
                first = [i + 1 for i in range(num) if text[i] in stops[k]]
                assert ends.lens[k] == min([most[k], *first])


def test_steps_that_are_not_known_yet_end_nothing():
    """Red if a step is looked at twice, or one that comes late is overlooked."""
    ends = TextEnds([9], [{7}])
    ends.see([])
    ends.see([[1]])
    assert ends.lens == [9]
    ends.see([[1], [7]])
    ends.see([[1], [7], [7]])
    assert ends.lens == [2]
