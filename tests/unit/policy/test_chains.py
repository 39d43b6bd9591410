"""Where chains of a head are cut."""

import itertools
import math
import random

import pytest

from sglang_parse.policy.gate import ChainRule


@pytest.mark.parametrize("fixed", [0.0, 0.5])
@pytest.mark.parametrize("least", [0.05, 0.3, 0.7])
def test_no_other_lengths_give_more(least, fixed):
    """Red if any choice of lengths, all of them tried, outweighs the one made."""
    rng, rule = random.Random(5), ChainRule(least, fixed, trust=0.9)

    def gain(chances, nums) -> float:
        stand = (
            math.prod(0.9 * p for p in one[: k + 1])
            for one, num in zip(chances, nums, strict=True)
            for k in range(num)
        )
        return sum(stand) - least * sum(nums) - fixed * any(nums)

    for _ in range(30):
        chances = [[rng.random() for _ in range(rng.randint(0, 4))] for _ in range(3)]
        every = itertools.product(*(range(len(one) + 1) for one in chances))
        best = max(gain(chances, one) for one in every)
        assert gain(chances, rule.choose(chances)) == pytest.approx(best)


def test_only_chains_with_a_likely_first_token_go_on():
    """Red if an unsure first token has the head run its other steps."""
    assert ChainRule(0.1, 0.0).starts([0.9, 0.01], 4) == [True, False]
    assert ChainRule(0.1, 0.0, trust=0.05).starts([0.9], 4) == [False]
