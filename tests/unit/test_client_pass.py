"""Clients' texts judged behind their prompts: what a pool that is short allows."""

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.client import ClientText
from sglang_parse.client_pass import ClientJudge, num_fitting, verify_groups
from sglang_parse.decide import Decision
from sglang_parse.plan import VerifyPlan
from sglang_parse.ranks import Ranks
from sglang_parse.verify import PassOutput


def test_groups_cover_every_boundary_in_order():
    """Red if a boundary is judged twice, or not at all, where a pass has no room."""
    boundaries = tuple(range(1, 12))
    groups = verify_groups(boundaries, room=50, suffix_len=20)
    assert [len(g) for g in groups] == [2, 2, 2, 2, 2, 1]
    assert sum(groups, ()) == boundaries
    assert verify_groups((), room=0, suffix_len=20) == [()]


ALONE = Ranks(SimpleNamespace(world_size=1))


class Slots:
    """A pool with `free` slots; a pass that asks for more would stop the scheduler."""

    table = torch.zeros(4, 64, dtype=torch.int32)

    def __init__(self, free: int, max_rows: int = 10_000, size: int = 400) -> None:
        self.free = free
        self.max_rows = max_rows
        self.allocator = SimpleNamespace(size=size)

    def num_free(self, tree_cache) -> int:
        return self.free

    def extend_rows(self, batch, lens) -> None:
        self.extended = lens

    def trim_rows(self, batch, lens) -> None:
        self.trimmed = lens


class Stages:
    """Keeps whatever was judged; notes the passes."""

    config = SimpleNamespace(max_segments=16)

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.plans: list[VerifyPlan] = []

    def verify(self, batch, plan: VerifyPlan) -> PassOutput:
        assert plan.num_suffix_tokens <= self.slots.free
        self.plans.append(plan)
        return PassOutput(None, torch.zeros(0, 0))

    def segments_to_recover(self, req, state, decision, *, rejected) -> int:
        return 1 if rejected else 0

    def scores(self, plan, output, states):
        return [(1.0,) * len(b) for b in plan.boundaries]

    def follow_target(self, batch, plan, output, cuts, drafts, chains):
        decisions = [
            Decision((*d.tokens[: c.num_kept], 99), c.num_kept, 0, ())
            for c, d in zip(cuts, drafts, strict=True)
        ]
        return decisions, None


def judge(
    monkeypatch,
    *,
    free: int,
    verify_only: bool,
    ends=(2, 4, 6),
    max_rows=10_000,
    size=400,
):
    """One request: a prompt of 5, a text of 6 in three segments, a suffix of 10."""
    options = SimpleNamespace(
        verify_only=verify_only, mode="semantic", threshold=0.5,
        keep_rule="first-failure", exact_tail=False, segmenter="line",
    )  # fmt: skip
    records = []
    state = SimpleNamespace(
        options=options, suffix=(7,) * 10, ready=(), pending=(), num_client=0,
        client=ClientText([1, 2, 3, 4, 5, 6], ends),
        report=SimpleNamespace(record=records.append),
    )  # fmt: skip
    req = SimpleNamespace(
        origin_input_ids=[10, 11, 12, 13, 14], output_ids=[], to_finish=None,
        kv=SimpleNamespace(kv_allocated_len=5),
        sampling_params=SimpleNamespace(max_new_tokens=50, stop_regex_strs=[]),
        grammar=None,
    )  # fmt: skip
    batch = SimpleNamespace(
        reqs=[req], req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([5]),
        sampling_info=None, tree_cache=None, device="cpu",
    )  # fmt: skip
    monkeypatch.setattr("sglang_parse.client_pass.expand_rows", lambda *_: None)
    stages = Stages(Slots(free, max_rows, size))
    tokens = torch.tensor([50])
    (up,) = ClientJudge(stages, ALONE, 1000).judge(batch, [0], [state], tokens)
    sent = () if verify_only else (tokens.item(), *state.ready)
    assert (up.start, tuple(up.tokens)) == (4, sent)
    return req, state, stages, tokens, records[0]


def test_texts_that_fit_are_judged_together():
    """Red if a request is refused for another's text, or a pass gets too long."""
    assert num_fitting([30, 30, 15, 1], room=100) == 3
    assert num_fitting([500, 1], room=100) == 1
    assert num_fitting([1], room=0) == 1


def test_text_longer_than_a_pass_is_refused(monkeypatch):
    """Red if one request can ask for more activations than there is memory for."""
    req, _, stages, _, _ = judge(monkeypatch, free=400, verify_only=True, max_rows=7)
    assert req.to_finish.status_code == 400
    assert "parse_verify has 6 tokens and there is room for 5" in req.to_finish.message
    assert "at most 7 (--chunked-prefill-size)" in req.to_finish.message


def test_text_that_fits_another_time_is_to_be_sent_again(monkeypatch):
    """Red if a client is told to shorten a text for what others occupy now, or to send
    one again that never fits."""
    req, *_ = judge(monkeypatch, free=7, verify_only=True)
    assert req.to_finish.status_code == 503
    assert "parse_verify has 6 tokens and there is room for" in req.to_finish.message
    assert req.to_finish.message.endswith("send the request again later.")
    req, *_ = judge(monkeypatch, free=7, verify_only=True, size=11)
    assert req.to_finish.status_code == 400  # the prompt's own slots are never free
    req, *_ = judge(monkeypatch, free=7, verify_only=True, max_rows=7)
    assert req.to_finish.status_code == 400
    assert "room for 5 behind this prompt" in req.to_finish.message


def test_a_kept_text_has_a_slot_for_what_follows(monkeypatch):
    """Red if the token behind a text that is kept whole has none: SGLang reserves by
    what it knows, the prompt, and a full pool then stops the scheduler."""
    *_, stages, _, _ = judge(monkeypatch, free=400, verify_only=False)
    assert stages.slots.extended == [5 + 6 + 1]
    *_, stages, _, _ = judge(monkeypatch, free=9, verify_only=False)
    (plan,) = stages.plans
    assert 5 + plan.num_draft_tokens[0] + 1 <= stages.slots.extended[0] <= 5 + 9


def test_a_text_that_takes_too_many_passes_is_refused(monkeypatch):
    """Red if one request holds the scheduler for hundreds of passes."""
    monkeypatch.setattr("sglang_parse.client_pass.MAX_VERIFY_ROWS", 40)
    ask = {"verify_only": True, "ends": (1, 2, 3, 4, 5, 6)}
    req, _, stages, *_ = judge(monkeypatch, free=400, max_rows=17, **ask)
    assert req.to_finish.status_code == 400 and len(stages.plans) == 1
    assert "6 verdicts, which take 6 passes" in req.to_finish.message
    monkeypatch.setattr("sglang_parse.client_pass.MAX_VERIFY_ROWS", 70)
    req, _, stages, *_ = judge(monkeypatch, free=20, **ask)
    assert req.to_finish.status_code == 503
    req, _, stages, *_ = judge(monkeypatch, free=400, **ask)
    assert req.to_finish is None and len(stages.plans) == 1


def test_what_gets_an_error_is_not_judged(monkeypatch):
    """Red if a refused text still holds the scheduler for all of its passes."""
    ask = {"verify_only": True, "ends": (1, 2, 3, 4, 5, 6)}
    req, _, stages, *_ = judge(monkeypatch, free=400, max_rows=7, **ask)
    assert req.to_finish.status_code == 400 and len(stages.plans) == 1
    assert stages.plans[0].boundaries == ((),)


def test_a_draft_that_takes_too_many_passes_is_judged_in_part(monkeypatch):
    """Red if it is refused as if it were a text to verify."""
    monkeypatch.setattr("sglang_parse.client_pass.MAX_VERIFY_ROWS", 40)
    req, _, stages, _, record = judge(
        monkeypatch, free=400, max_rows=17, verify_only=False, ends=(1, 2, 3, 4, 5, 6)
    )
    assert req.to_finish is None and len(stages.plans) == 1
    assert record.boundaries == (1,) and record.accept_tokens[0] == 1


def test_stop_expressions_bound_a_client_s_text_too(monkeypatch):
    """Red if all of a long text is sent in one round: SGLang looks for each expression
    behind every token of it."""
    req, state, stages, *_ = judge(monkeypatch, free=400, verify_only=False)
    assert stages.plans[0].num_draft_tokens == (6,)
    monkeypatch.setattr("sglang_parse.client_pass.longest_draft", lambda _: 3)
    req, state, stages, *_ = judge(monkeypatch, free=400, verify_only=False)
    assert stages.plans[0].num_draft_tokens == (3,)
    _, _, stages, *_ = judge(monkeypatch, free=400, verify_only=True)
    assert stages.plans[0].num_draft_tokens == (6,)


def test_suffixes_beyond_a_pass_take_more_passes(monkeypatch):
    """Red if suffix rows are not counted among those of a pass."""
    req, _, stages, _, record = judge(
        monkeypatch, free=400, verify_only=True, max_rows=28
    )
    assert req.to_finish is None and record.num_passes == 2
    assert [p.num_suffix_tokens for p in stages.plans] == [20, 10]


def test_kept_text_is_sent_from_its_first_token(monkeypatch):
    """Red if the target's first token goes out before a judged text."""
    req, state, stages, tokens, record = judge(monkeypatch, free=40, verify_only=False)
    assert tokens.tolist() == [1]
    assert state.ready == (2, 3, 4, 5, 6, 99)
    assert stages.slots.trimmed == [5 + 7]
    assert record.num_judged == 6 and req.to_finish is None


@pytest.mark.parametrize("free", [10, 15, 25])
def test_a_short_pool_takes_more_passes(monkeypatch, free):
    """Red if a pass asks for more scratch slots than there are."""
    _, _, stages, tokens, record = judge(monkeypatch, free=free, verify_only=True)
    assert record.num_passes == len(stages.plans) == (2 if free == 25 else 3)
    assert record.boundaries == (2, 4, 6) and len(record.scores) == 3
    assert tokens.tolist() == [50]


@pytest.mark.parametrize("ends", [(0, 2, 6), (2, 2, 6), (2, 6, 6)])
def test_a_segment_without_tokens_is_refused(monkeypatch, ends):
    """Red if a segment that the tokenizer drops stops the scheduler."""
    req, _, stages, _, _ = judge(monkeypatch, free=40, verify_only=True, ends=ends)
    place = [0, *ends].index(next(e for e in (0, *ends) if (0, *ends).count(e) > 1))
    assert req.to_finish.status_code == 400
    assert f"parse_verify[{place}] has no tokens" in req.to_finish.message
    assert stages.plans[0].boundaries == ((),)


@pytest.mark.parametrize("verify_only", [False, True])
def test_a_pool_without_room_for_one_suffix(monkeypatch, verify_only):
    """Red if such a request stops the scheduler, or an unjudged text is kept."""
    req, state, stages, tokens, record = judge(
        monkeypatch, free=9, verify_only=verify_only
    )
    assert stages.plans[0].num_suffix_tokens == 0
    assert record.num_judged == 0 and record.scores == ()
    if verify_only:
        assert req.to_finish.status_code == 503
        assert req.to_finish.message.endswith("send the request again later.")
        req, *_ = judge(monkeypatch, free=9, verify_only=True, size=14)
        assert req.to_finish.status_code == 400
    else:
        assert tokens.tolist() == [99] and state.ready == ()
