"""After a rejection the target writes on to a boundary before verdicts count again."""

import dataclasses
from types import SimpleNamespace

import pytest

from sglang_parse.decide import Decision, choose_cut, decide, exact_cut
from sglang_parse.segment import Segmenter
from sglang_parse.stages import TargetStages
from sglang_parse.state import RoundDraft

TEXTS = ["a", "b", "\n", "c"]
LINE = 2


def stages(room: int = 100) -> TargetStages:
    """The stages' segmenting, over a vocabulary of four tokens."""
    self = object.__new__(TargetStages)
    self.config = SimpleNamespace(max_segments=16)
    self.slots = SimpleNamespace(num_free=lambda _: room)
    self._token_texts = TEXTS
    self.segmenter = lambda name: Segmenter(name, TEXTS)
    return self


def state(recovering: int = 0, limit: int = 1):
    options = SimpleNamespace(mode="semantic", segmenter="line", recover_limit=limit)
    return SimpleNamespace(
        options=options, suffix=(9,) * 5, recovering=recovering, ready=()
    )


REQ = SimpleNamespace(output_ids=[0])
DRAFT = RoundDraft((0, LINE, 1, LINE, 3, 3, LINE, 0))  # boundaries 2, 4, 7


@pytest.mark.parametrize(
    ("recovering", "boundaries", "head_end"),
    [
        (0, (2, 4, 7), 0),
        (1, (4, 7), 2),
        (2, (7,), 4),
        (3, (), 7),
        (4, (), 8),
        (1 << 40, (), 8),
    ],
)
def test_leading_segments_are_the_targets(recovering, boundaries, head_end):
    """Red if a segment the target has to write is judged instead."""
    batch = SimpleNamespace(reqs=[REQ], tree_cache=None)
    assert stages().segment(batch, [state(recovering)], [DRAFT]) == (
        [boundaries],
        [head_end],
    )


@pytest.mark.parametrize(
    ("num_head", "recovering", "boundaries", "head_end"),
    [(1, 0, (2, 4, 7), 1), (3, 0, (4, 7), 3), (3, 1, (4, 7), 3), (1, 1, (4, 7), 2)],
)
def test_the_heads_tokens_are_never_judged(num_head, recovering, boundaries, head_end):
    """Red if a verdict keeps a token of the EAGLE-3 head that the target denies."""
    batch = SimpleNamespace(reqs=[REQ], tree_cache=None)
    draft = dataclasses.replace(DRAFT, num_head=num_head)
    found = stages().segment(batch, [state(recovering)], [draft])
    assert found == ([boundaries], [head_end])


def test_recovery_goes_on_where_no_suffix_fits():
    """Red if a short pool lets a draft pass that only the target could confirm."""
    batch = SimpleNamespace(reqs=[REQ], tree_cache=None)
    found = stages(room=4).segment(batch, [state(1)], [DRAFT])
    assert found == ([()], [2])


def left(tokens, *, rejected, num_judged=0, recovering=0, limit=1) -> int:
    decision = Decision(tuple(tokens), num_judged, 0, ())
    return stages().segments_to_recover(
        REQ, state(recovering, limit), decision, rejected=rejected
    )


def test_a_rejection_is_recovered_up_to_the_next_boundary():
    """Red if drafting under verdicts resumes inside the segment that was rejected, or
    a boundary in front of the rejection ends the recovery."""
    assert left([0, LINE, 1], rejected=True, num_judged=2) == 1
    assert left([0, LINE, 1, LINE], rejected=True, num_judged=2) == 0
    assert left([0, LINE, 1, LINE], rejected=True, num_judged=2, limit=3) == 2
    assert left([0, LINE, 1], rejected=True, num_judged=2, limit=0) == 0
    assert left([0, 1], rejected=False) == 0
    assert left([0, 1], rejected=False, recovering=2) == 2
    assert left([0, LINE, 1], rejected=False, recovering=2) == 1
    assert left([LINE, LINE, 0, LINE], rejected=False, recovering=1) == 0


def test_a_round_that_is_not_judged_follows_every_draft_token_by_token():
    """Red if a draft token stands without a verdict and without the target's consent,
    or waits for a boundary that nobody judges."""
    batch = SimpleNamespace(reqs=[REQ, REQ], tree_cache=None)
    found = stages().segment(batch, [state(), state(1)], [DRAFT, DRAFT], judged=False)
    assert found == ([(), ()], [8, 8])
    cut = choose_cut(
        (), (), num_draft_tokens=8, threshold=0.5, keep_rule="first-failure",
        exact_tail=True, head_end=8,
    )  # fmt: skip
    assert cut.rows == exact_cut(8).rows
    for target in ([*DRAFT.tokens, 1], [0, LINE, 0, *DRAFT.tokens[3:], 1]):
        got, exact = (decide(c, DRAFT.tokens, target) for c in (cut, exact_cut(8)))
        assert (got.accept_tokens, got.pending) == (exact.accept_tokens, ())
