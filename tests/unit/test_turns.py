"""Who drafts for whom, and how much."""

from types import SimpleNamespace

import pytest

from sglang_parse.config import ParseConfig
from sglang_parse.decide import Cut, Decision
from sglang_parse.drafters import Turn
from sglang_parse.pace import RoundLimits, RoundTiming
from sglang_parse.request import REST
from sglang_parse.state import RequestState, RoundDraft
from sglang_parse.telemetry import TELEMETRY
from sglang_parse.turns import NUM_WAITING, TurnPlanner, note_waiting

HINT = SimpleNamespace()


def planner(*, has_model: bool = True, head_steps: int = 4, **settings) -> TurnPlanner:
    ranks = SimpleNamespace(agree=lambda value: value, agree_all=lambda lists: lists)
    slots = SimpleNamespace(num_free=lambda _: 10_000, max_rows=10_000)
    return TurnPlanner(
        ParseConfig(**settings), ranks, slots,
        context_len=1000, has_model=has_model, head_steps=head_steps,
    )  # fmt: skip


def state(
    mode: str = "semantic", *, hint=HINT, exact_tail: bool = True, judge=None, **more
) -> RequestState:
    options = SimpleNamespace(mode=mode, window=32, exact_tail=exact_tail)
    return RequestState(options, frozenset(), judge, None, hint=hint, **more)


def plan_turn(
    plan: TurnPlanner,
    *states: RequestState,
    max_new: int = 100,
    grammar=None,
    stop_regex=None,
) -> Turn:
    reqs = [
        SimpleNamespace(
            output_ids=[1],
            grammar=grammar,
            kv=SimpleNamespace(kv_allocated_len=20),
            sampling_params=SimpleNamespace(
                max_new_tokens=max_new, stop_regex_strs=stop_regex
            ),
        )
        for _ in states
    ]
    batch = SimpleNamespace(reqs=reqs, tree_cache=None)
    return plan.plan(batch, states, [10] * len(states), [grammar] * len(states))


def test_many_stop_expressions_shorten_a_round():
    """Red if one request's expressions, looked for behind every token of a round, hold
    all others up."""
    assert plan_turn(planner(), state()).windows == [32]
    assert plan_turn(planner(), state(), stop_regex=["a"]).windows == [32]
    assert plan_turn(planner(), state(), stop_regex=["a"] * 16).windows == [16]
    assert plan_turn(planner(), state(), stop_regex=["a"] * 99).windows == [8]


def test_round_knows_how_many_wait(monkeypatch):
    """Red if the scheduler's queue does not reach the bound on the round."""
    batch = SimpleNamespace(reqs=[1] * 4)
    note_waiting(SimpleNamespace(), batch)  # a server without PARSE
    assert not hasattr(batch, NUM_WAITING)
    monkeypatch.setattr(TELEMETRY, "settings", {})
    scheduler = SimpleNamespace(
        waiting_queue=[1] * 9, get_num_allocatable_reqs=lambda bs: 7 - bs
    )
    note_waiting(scheduler, batch, pp_proxy_tensors=None)
    asked = {}
    plan = planner()
    plan.model_controller = SimpleNamespace(
        limits=lambda bs, **kwargs: asked.update(kwargs) or RoundLimits(5, True),
        segment_len=0.0,
    )
    limits, _ = plan._agreed_limits(batch, [state()], judged=True)
    assert asked["num_waiting"] == 3 and limits == RoundLimits(5, True)
    # Shorter rounds let nobody in where there is no row for them.
    note_waiting(scheduler, full := SimpleNamespace(reqs=[1] * 8))
    assert getattr(full, NUM_WAITING) == 0


def test_neighbour_without_drafts_shortens_a_draft_only_where_windows_adapt():
    """Red if, with fixed windows, a request's drafts depend on who runs beside it."""
    fixed, adaptive = planner(adaptive=False), planner()
    assert windows(fixed, state(), state("off"))[0] == (32, 0)
    assert windows(adaptive, state(), state("off"))[0] == (16, 0)


def windows(plan: TurnPlanner, *states: RequestState, **kwargs):
    turn = plan_turn(plan, *states, **kwargs)
    return list(zip(turn.windows, turn.head_windows, strict=True))


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (state(), (32, 0)),
        (state("exact"), (4, 4)),
        (state("off"), (0, 0)),
        (state("exact", hint=None), (32, 0)),
        (state(recovering=1), (32, 4)),
        (state(recovering=REST - 1), (4, 4)),
        (state(recovering=REST - 1, hint=None), (32, 0)),
        (state("exact", pending=(7, 8)), (2, 0)),
        (state(recovering=1, pending=(7, 8)), (32, 0)),
    ],
)
def test_the_head_writes_where_the_target_is_followed(one, expected):
    """Red if the head drafts what is judged by meaning, or the draft model what is
    followed token by token although there is a head."""
    assert windows(planner(adaptive=False), one) == [expected]


def test_without_a_draft_model_the_head_writes_alone():
    """Red if a client's text is no longer tried first, or nobody drafts."""
    alone = planner(has_model=False, adaptive=False)
    one = state("exact", pending=(7,) * 9)
    assert windows(alone, state("exact"), one) == [(4, 4), (9, 0)]
    assert windows(
        planner(has_model=False, head_steps=0), state("exact", hint=None)
    ) == [(0, 0)]


def test_limits_bind_the_head_too():
    """Red if the head drafts past the response, or under a grammar."""
    assert windows(planner(), state("exact"), max_new=4) == [(2, 2)]
    assert windows(planner(), state("exact"), max_new=2) == [(0, 0)]
    both = planner(adaptive=False)
    assert windows(both, state("exact"), grammar=object()) == [(32, 0)]


def observe(
    plan: TurnPlanner, *, num_steps: int, emitted: int, ms: float, head: int = 0
):
    drafts = [RoundDraft((1,) * (num_steps or head), num_new=num_steps, num_head=head)]
    turn = Turn(None, [state()], [10], [num_steps or head], [head], [None])
    plan.observe(turn, drafts, RoundTiming(1, num_steps, emitted, 0.0, ms))


def test_a_paused_draft_model_leaves_its_turn_to_the_head():
    """Red if nobody drafts while the draft model does not pay and the head does."""
    plan = planner()
    plan.observe_plain(1, 10.0)
    for _ in range(3):
        observe(plan, num_steps=32, emitted=1, ms=100.0)
        observe(plan, num_steps=0, emitted=4, ms=12.0, head=4)
    assert windows(plan, state()) == [(4, 4)]
    # Where the head does not pay either, the target decodes alone.
    for _ in range(12):
        observe(plan, num_steps=0, emitted=1, ms=40.0, head=4)
    assert (0, 0) in [windows(plan, state())[0] for _ in range(3)]


def test_the_head_does_not_take_the_draft_models_turn():
    """Red if the draft model is measured against the head and its verdicts are lost:
    it pauses only where the target alone would be faster."""
    plan = planner()
    observe(plan, num_steps=32, emitted=10, ms=100.0)  # 10 ms a token
    observe(plan, num_steps=0, emitted=4, ms=12.0, head=4)  # 3 ms a token
    assert windows(plan, state()) == [(32, 0)]
    plan = planner()
    observe(plan, num_steps=32, emitted=10, ms=100.0)
    observe(plan, num_steps=0, emitted=4, ms=9.0, head=4)
    assert windows(plan, state()) == [(4, 4)]


def followed_share(*states: RequestState) -> float:
    """Of rounds in which every verdict costs more than it gives."""
    plan, turns = planner(head_steps=0), []
    plan.observe_plain(len(states), 30.0)
    for _ in range(100):
        turns.append(plan_turn(plan, *states))
        judged = turns[-1].judged
        ms, tokens = (200.0, 10) if judged else (60.0, 6)
        drafts = [RoundDraft((1,) * 16, num_new=16) for _ in states]
        timing = RoundTiming(
            len(states), 16, tokens * len(states), 0.0, ms, judged=judged
        )
        plan.observe(turns[-1], drafts, timing)
    return sum(not turn.judged for turn in turns) / len(turns)


def test_costly_verdicts_are_left_out_only_where_the_tail_is_exact():
    """Red if a request without the exact tail, or a client's text, loses its verdicts
    to measured times, or a request with it keeps verdicts that do not pay."""
    assert followed_share(state()) > 0.6
    assert followed_share(state(exact_tail=False)) == 0
    assert followed_share(state(), state(exact_tail=False)) == 0
    assert followed_share(state(), state(client=object())) == 0
    assert followed_share(state("exact")) == 1


def test_a_followed_round_has_a_window_of_its_own():
    """Red if a window that verdicts have grown is drafted for agreement of tokens."""
    plan, one = planner(head_steps=0), state(hint=None, followed_window=8)
    seen = set()
    plan.observe_plain(1, 30.0)
    for _ in range(100):
        turn = plan_turn(plan, one)
        seen.add((turn.judged, turn.windows[0]))
        plan.observe(
            turn,
            [RoundDraft((1,) * 16, num_new=16)],
            RoundTiming(1, 16, 10, 0.0, 60.0, judged=turn.judged),
        )
    assert seen == {(True, 32), (False, 8)}


def rounds_with_a_head(plan: TurnPlanner, one: RequestState, *, judged_ms: float):
    """(judged, windows, head windows) of 200 rounds in which the head gives 4 tokens
    in 30 ms and verdicts keep 12 in judged_ms."""
    plan.observe_plain(1, 28.0)
    seen = []
    for _ in range(200):
        turn = plan_turn(plan, one)
        seen.append((turn.judged, turn.windows[0], turn.head_windows[0]))
        if turn.judged:
            drafts = [RoundDraft((1,) * 16, num_new=16)]
            timing = RoundTiming(1, 16, 12, 0.0, judged_ms)
        else:
            drafts = [RoundDraft((1,) * 4, num_head=4)]
            timing = RoundTiming(1, 0, 4, 0.0, 30.0, judged=False)
        plan.observe(turn, drafts, timing)
    return seen


def test_where_verdicts_do_not_pay_the_head_drafts():
    """Red if a semantic request is followed token by token behind the draft model
    although there is a head, or keeps verdicts that give less than the head does."""
    seen = rounds_with_a_head(planner(), state(), judged_ms=200.0)
    assert set(seen) == {(True, 32, 0), (False, 4, 4)}
    assert sum(not judged for judged, *_ in seen) > 150
    # What is pending is verified before the head goes on.
    turn = plan_turn(planner(), state(), state(pending=(7, 8)))
    assert turn.judged
    pending = state(pending=(7, 8))
    late = planner()
    rounds_with_a_head(late, state(), judged_ms=200.0)
    turn = plan_turn(late, pending)
    assert (turn.judged, turn.windows, turn.head_windows) == (False, [2], [0])


def test_verdicts_that_give_more_than_the_head_stay():
    """Red if trying the head costs a server more than a share of its rounds."""
    seen = rounds_with_a_head(planner(), state(), judged_ms=60.0)
    assert sum(not judged for judged, *_ in seen) < 40


def adapted(one: RequestState, *, judged: bool, kept: int, rejected_end: int = 0):
    """The state's windows (judged, followed) after a round of 16 drafted tokens."""
    turn = Turn(None, [one], [10], [16], [0], [None], judged)
    draft = RoundDraft((1,) * 16, num_new=16)
    cut = Cut(kept if judged else 0, kept, False, rejected_end)
    decision = Decision((1,) * (kept + 1), cut.num_kept, kept - cut.num_kept, ())
    planner().adapt(turn, [draft], [cut], [decision])
    return one.judged_window, one.followed_window


def test_the_rejected_part_of_a_draft_stays_suspect():
    """Red if, after a verdict over several segments has failed, the wrong one among
    them is looked for by verdicts that cover several again."""
    one = state()
    adapted(one, judged=True, kept=4, rejected_end=12)
    assert one.num_suspect == 12 - 5
    adapted(one, judged=True, kept=3)
    assert one.num_suspect == 7 - 4
    adapted(one, judged=True, kept=16)
    assert one.num_suspect == 0


def test_costly_suffixes_are_attached_less_often():
    """Red if what rows cost does not reach the plan, or does without adaptation."""
    for adaptive, expected in ((True, 3), (False, 1)):
        plan = planner(adaptive=adaptive)
        one = state(judge=SimpleNamespace(suffix=(9,) * 14))
        for rows in range(100, 700, 40):
            turn = plan_turn(plan, one)
            draft = RoundDraft((1,) * 30, num_new=30)
            accepted = Decision((1,) * 31, 30, 0, ())
            plan.adapt(turn, [draft], [Cut(30, 30, False)], [accepted])
            timing = RoundTiming(
                *(1, 30, 31, 10.0, 0.2 * rows),
                segment_len=10.0,
                num_rows=rows,
                pass_ms=0.2 * rows,
            )
            plan.observe(turn, [draft], timing)
        assert plan_turn(plan, one).judge_every == expected
    # Ranks do what the first of them has measured.
    plan = planner()
    plan.ranks.agree_all = lambda lists: [(20, 1, 2)]
    turn = plan_turn(plan, one)
    assert (turn.judge_every, turn.windows) == (2, [20])


def test_a_segment_that_failed_with_others_counts_once():
    """Red if the search for the wrong segment makes the draft look worse than it is."""
    plan, one = planner(), state()
    turn = Turn(None, [one], [10], [36], [0], [None], True)
    draft = RoundDraft((1,) * 36, num_new=36)
    counted = []
    for rejected_end in (36, 12, 24):
        cut = Cut(0, 0, False, rejected_end)
        plan.adapt(turn, [draft], [cut], [Decision((1,) * 3, 0, 2, ())])
        counted.append(round(plan.spacing._failures))
    assert counted == [1, 1, 2]


def test_a_round_changes_the_window_of_its_own_kind():
    """Red if tokens that differ shorten what verdicts may keep, or the reverse."""
    assert adapted(state(), judged=True, kept=4, rejected_end=12) == (12, 16)
    assert adapted(state(), judged=True, kept=16) == (0, 16)
    assert adapted(state(), judged=False, kept=5) == (0, 10)
    assert adapted(state(), judged=False, kept=16) == (0, 32)
    assert adapted(state("exact"), judged=False, kept=16) == (0, 32)
    recovering = state(recovering=REST - 1)
    assert adapted(recovering, judged=True, kept=16) == (0, 32)
