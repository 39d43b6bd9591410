"""docs/one-screen.md is the algorithm: its one forward equals one per prefix."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "one-screen.md"
THRESHOLD = 0.5


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    """What the code of the page defines."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


def contexts() -> list[list[int]]:
    return np.random.default_rng(7).integers(0, 12, size=(40, 10)).tolist()


def judged_one_by_one(page, target, context, draft) -> tuple[list[float], list[int]]:
    """The same round by one causal pass per prefix and one per token of the tail."""
    ends = [i + 1 for i, token in enumerate(draft) if token == page.NEWLINE]
    scores = []
    for end in ends:
        row = target.read([*context, *draft[:end], *page.SUFFIX])[-1]
        yes, no = np.exp(row[page.YES]), np.exp(row[page.NO])
        scores.append(yes / (yes + no))
    kept, limit = 0, len(draft)
    for end, score in zip(ends, scores, strict=True):
        if score < THRESHOLD:
            limit = end
            break
        kept = end
    while True:
        own = int(target.read([*context, *draft[:kept]])[-1].argmax())
        if kept == limit or draft[kept] != own:
            return scores, [*draft[:kept], own]
        kept += 1


def test_one_screen_is_one_screen():
    """Red if the page grows over 60 lines."""
    assert len(PAGE.read_text().splitlines()) <= 60


def test_one_screen_equals_one_forward_per_prefix(page):
    """Red if a suffix of the page sees a later draft token or another suffix, or if the
    cut, the exact tail or the bonus token is not the one of separate passes."""
    target, draft_model = page.Model(), page.Model(noise=0.2)
    for context in contexts():
        draft, scores, accepted = page.parse_round(target, draft_model, context)
        expected_scores, expected = judged_one_by_one(page, target, context, draft)
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-9)
        assert accepted == expected


def test_one_screen_shows_every_outcome(page):
    """Red if the contexts above no longer contain every way in which a round ends."""
    outcomes = set()
    for context in contexts():
        draft, scores, accepted = page.parse_round(
            page.Model(), page.Model(noise=0.2), context
        )
        ends = [0] + [i + 1 for i, t in enumerate(draft) if t == page.NEWLINE]
        failed = [k for k, score in enumerate(scores) if score < THRESHOLD]
        cut = ends[failed[0]] if failed else ends[-1]
        has_tail = len(accepted) - 1 > cut
        outcomes.add((bool(failed), cut > 0, has_tail))
    assert {(f, c, t) for f, c, t in outcomes if f} >= {
        *((True, True, True), (True, True, False), (True, False, True))
    }
    assert (False, True, True) in outcomes and (False, False, True) in outcomes
