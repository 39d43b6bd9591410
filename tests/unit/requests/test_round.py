"""The record of a request in a round."""

from types import SimpleNamespace

from sglang_parse.judging.decide import Cut, Decision
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round, Segments


def record(**more) -> RequestRound:
    state = SimpleNamespace(options=SimpleNamespace(mode="semantic"))
    return RequestRound(None, state, 0, 5, 1, output_len=1, **more)


def test_draft_is_empty_by_default():
    """Red if a request that does not draft counts as ended or as drafted."""
    draft = Draft()
    assert (draft.tokens, draft.ended, draft.parts) == ((), False, ())
    counts = (draft.num_client, draft.num_token_level, draft.num_segment_level)
    assert counts == (0, 0, 0) and draft.num_new == 0


def test_drafters_write_behind_each_other():
    """Red if a drafter loses what stood before it, or its tokens count as another's:
    reports, windows and verdicts go by who wrote what."""
    draft = Draft((7, 8), num_client=2)
    draft = draft.extended("eagle3", (9,), ended=False, token_level=True)
    draft = draft.extended("model", (10, 11), ended=True, token_level=False)
    assert draft.tokens == (7, 8, 9, 10, 11) and draft.ended
    assert (draft.num_client, draft.num_token_level) == (2, 3)
    assert (draft.num_segment_level, draft.num_new) == (2, 3)
    assert [draft.num_by(name) for name in ("eagle3", "model", "other")] == [1, 2, 0]


def test_an_end_of_nothing_leaves_no_token_to_confirm():
    """Red if a drafter that says at once that the response ends makes tokens of others
    its own."""
    draft = Draft().extended("eagle3", (), ended=True, token_level=True)
    assert draft.ended and (draft.num_token_level, draft.num_new) == (0, 0)


def test_target_sees_the_draft_up_to_its_last_boundary():
    """Red if tokens that no verdict can keep are forwarded, or others are not."""
    one = record(draft=Draft((1, 2, 3)))
    assert one.shown == (1, 2, 3)
    one.segments = Segments((1, 2))
    assert one.shown == (1, 2)


def test_only_a_verdict_rejects():
    """Red if the target's disagreement in the exact part counts as a failed verdict."""
    cut = Cut(2, 6, False, rejected_end=6, exact_end=2)
    one = record(kept=Kept(cut, Decision((1, 2, 9), 2, 0, ())))
    assert (one.rejected_end, one.new_len) == (6, 8)
    one.kept = Kept(cut, Decision((1, 9), 0, 1, ()))
    assert (one.rejected_end, one.new_len) == (0, 7)


def test_a_round_is_drafted_where_anybody_holds_a_draft():
    """Red if a batch decodes plainly although one of it has a draft, or passes through
    the target for nothing."""
    one, other = record(), record()
    round = Round(None, [one, other])
    assert not round.is_drafted and round.has_semantic and len(round) == 2
    other.draft = Draft((1,))
    assert round.is_drafted
