"""A fault at every stage of a round: whom it costs the answer."""

from types import SimpleNamespace

import pytest

from sglang_parse.engine import outcome, round, shown
from sglang_parse.engine.failures import GuardedDrafters
from sglang_parse.sgl.fast_paths import PassFailed, PassLacksMemory
from tests.support.fake_engine import LINE, FakeDrafter, FakeServer, FakeTarget
from tests.support.fake_engine import make_request as make

DRAFT = (20, 21, LINE, 22, 23, LINE)
OTHER = 30


class Fault(Exception):
    """Stands for a bug."""


def own(tokens):
    """The target writes the draft, then OTHER."""
    done = len(tokens) - 3
    return DRAFT[done] if done < len(DRAFT) else OTHER


def serve():
    drafter = FakeDrafter(lambda tokens: DRAFT[len(tokens) - 3 :])
    return FakeServer(FakeTarget(own, lambda tokens: 0.9), [drafter]), drafter


def for_victim(step):
    """`step` of one request, which raises for the victim."""

    def broken(r, *args, **kwargs):
        if r.req.rid == "victim":
            raise Fault
        return step(r, *args, **kwargs)

    return broken


def always(*args, **kwargs):
    raise Fault


# Where a fault is put: the object that holds the step, by the server, and its name.
ONE_REQUEST = {
    "pending": (lambda server: round, "resume_draft"),
    "segment": (lambda server: server.engine.segmenting, "_cut"),
    "cut": (lambda server: outcome, "choose_cut_of"),
    "follow": (lambda server: outcome, "_keep"),
    "recover": (lambda server: server.engine.segmenting, "recover"),
    "report": (lambda server: outcome, "record_of"),
}
NOBODY = {
    "draft": (lambda server: server.engine.drafters.drafters[0], "draft"),
    "after the pass": (lambda server: server.engine.drafters.drafters[0], "after_pass"),
}
EVERYBODY = {
    "plan": (lambda server: server.engine.planner, "plan"),
    "slots": (lambda server: server.engine.slots, "extend_rows"),
    "layout": (lambda server: shown, "build_verify_plan"),
    "pass": (lambda server: server.target, "verify"),
    "score": (lambda server: server.engine.verdicts, "judge"),
    "agree on scores": (lambda server: server.ranks, "agree_all"),
    "sample": (lambda server: server.target, "sample"),
    "commit": (lambda server: server.engine.slots, "trim_rows"),
    "adapt": (lambda server: server.engine.planner, "adapt"),
    "observe": (lambda server: server.engine.planner, "observe"),
}


def requests():
    victim, other = make(), make()
    victim.rid, other.rid = "victim", "other"
    return victim, other


@pytest.mark.parametrize("stage", ONE_REQUEST)
def test_a_fault_in_one_request_costs_that_request_alone(stage, monkeypatch):
    """Red if another request loses a token, or the server ends."""
    server, _ = serve()
    victim, other = requests()
    holder, name = ONE_REQUEST[stage]
    broken = for_victim(getattr(holder(server), name))
    monkeypatch.setattr(holder(server), name, broken)
    records = server.round(victim, other).requests
    assert isinstance(records[0].error, Fault) and records[1].error is None
    assert victim.output_ids == [12]
    assert other.output_ids == [12, *DRAFT, OTHER]
    # Its slots of the round are free again.
    assert victim.kv.kv_allocated_len == records[0].new_len


@pytest.mark.parametrize("stage", NOBODY)
def test_a_fault_in_a_drafter_costs_nobody_a_token(stage, monkeypatch):
    """Red if a request ends, or gets another token, where a drafter fails."""
    server, drafter = serve()
    victim, other = requests()
    holder, name = NOBODY[stage]
    monkeypatch.setattr(holder(server), name, always)
    for _ in range(len(DRAFT) + 1):
        records = server.round(victim, other).requests
        assert not any(r.error for r in records)
    for req in (victim, other):
        assert tuple(req.output_ids[1 : 1 + len(DRAFT)]) == DRAFT
        assert req.state.failed_drafters == {drafter.name}


@pytest.mark.parametrize("stage", EVERYBODY)
def test_a_fault_in_what_all_share_is_not_hidden(stage, monkeypatch):
    """Red if a round goes on whose slots, pass or plan nobody can trust."""
    server, _ = serve()
    holder, name = EVERYBODY[stage]
    monkeypatch.setattr(holder(server), name, always)
    with pytest.raises(Fault):
        server.round(*requests())


def test_where_no_pass_can_run_the_target_answers_alone(monkeypatch):
    """Red if a request loses a token when the last route fails, or drafts are made that
    nothing can verify."""
    server, drafter = serve()

    def broken(*_):
        raise PassFailed

    monkeypatch.setattr(server.target, "verify", broken)
    victim, other = requests()
    for _ in range(2):
        server.round(victim, other)
    num_asked = drafter.num_asked
    while len(other.output_ids) <= len(DRAFT):
        server.round(victim, other)
    assert victim.output_ids[1 : 1 + len(DRAFT)] == list(DRAFT)
    assert other.output_ids[1 : 1 + len(DRAFT)] == list(DRAFT)
    assert drafter.num_asked == num_asked


def test_a_pass_without_memory_costs_its_draft_alone(monkeypatch):
    """Red if a shortage in one pass ends drafting, or a request loses a token."""
    server, _ = serve()
    verify, failing = server.target.verify, [PassLacksMemory]

    def scarce(*args):
        if failing:
            raise failing.pop()
        return verify(*args)

    monkeypatch.setattr(server.target, "verify", scarce)
    both = requests()
    server.round(*both)
    assert [len(one.output_ids) for one in both] == [2, 2]
    while len(both[1].output_ids) <= len(DRAFT):
        server.round(*both)
    assert [tuple(one.output_ids[1 : 1 + len(DRAFT)]) for one in both] == [DRAFT] * 2
    assert server.engine.drafters.drafters and not failing


def test_a_drafter_that_fails_leaves_the_drafts_before_it_unfinished():
    """Red if a draft that another drafter has not completed counts as complete, and is
    verified too early, because a later drafter has failed."""

    def write(round):
        for r in round:
            r.draft, r.is_drafting = f"of {r.rid}", r.rid == "a"

    def fail(round):
        for r in round:
            r.draft, r.is_drafting = "lost", True
        raise RuntimeError("broken")

    round = [
        SimpleNamespace(
            rid=rid,
            draft="",
            is_drafting=False,
            state=SimpleNamespace(failed_drafters=set()),
        )
        for rid in "ab"
    ]
    drafters = [
        SimpleNamespace(name="model", draft=write),
        SimpleNamespace(name="bad", draft=fail),
    ]
    GuardedDrafters(drafters).draft(round)
    assert [(r.draft, r.is_drafting) for r in round] == [
        ("of a", True),
        ("of b", False),
    ]
    assert all(r.state.failed_drafters == {"bad"} for r in round)
