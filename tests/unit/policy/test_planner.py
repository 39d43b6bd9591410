"""Who drafts for whom, and how much."""

from types import SimpleNamespace

import pytest

from sglang_parse.judging.decide import Cut, Decision
from sglang_parse.options.request import REST
from sglang_parse.options.server import ParseConfig
from sglang_parse.policy.gate import (
    ENOUGH_DRAFTED,
    ENOUGH_HEADED,
    ENOUGH_REWRITTEN,
    TRIAL_TOKENS,
    Gate,
    Situation,
)
from sglang_parse.policy.planner import IDLE_ROUNDS, MOST_STEPS, RoundPlanner
from sglang_parse.policy.window import Choice
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.limits import longest_draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round, Segments
from sglang_parse.requests.state import RequestState


class Writer:
    """A drafter as the planner sees it. The head writes where it has a hint and there
    is no grammar."""

    def __init__(self, name: str, *, token_level: bool, max_tokens: int = 0) -> None:
        self.name, self.token_level, self.max_tokens = name, token_level, max_tokens

    def can_draft(self, r: RequestRound) -> bool:
        if self.name in r.state.failed_drafters:
            return False
        return not self.token_level or (r.state.hinted and r.grammar is None)


def planner(*, has_model: bool = True, head_steps: int = 4, **settings) -> RoundPlanner:
    ranks = SimpleNamespace(agree=lambda value: value, agree_all=lambda lists: lists)
    slots = SimpleNamespace(num_free=lambda *_: 10_000, max_rows=10_000, page_size=1)
    drafters = []
    if head_steps:
        drafters.append(Writer("eagle3", token_level=True, max_tokens=head_steps))
    if has_model:
        drafters.append(Writer("model", token_level=False))
    return RoundPlanner(
        ParseConfig(**settings), ranks, slots, drafters, context_len=1000
    )


def state(
    mode: str = "semantic", *, hint: bool = True, exact_tail: bool = True, judge=None,
    every: int = 0, exact_head: int = 0,
    **more,
) -> RequestState:  # fmt: skip
    """hint: whether the head can go on for this request."""
    options = SimpleNamespace(
        mode=mode,
        window=32,
        exact_tail=exact_tail,
        judge_every=every,
        exact_head=exact_head,
    )
    one = RequestState(options, frozenset(), judge, None, **more)
    one.hinted = hint
    return one


def make_round(
    *states: RequestState, max_new: int = 100, grammar=None, stops=(), **more
) -> Round:
    requests = []
    strings, expressions, longest = stops or ((), (), 0)
    for row, one in enumerate(states):
        params = SimpleNamespace(
            max_new_tokens=max_new,
            stop_strs=strings,
            stop_regex_strs=expressions,
            stop_str_max_len=longest,
            stop_regex_max_len=longest,
        )
        req = SimpleNamespace(
            output_ids=[1],
            grammar=grammar,
            kv=SimpleNamespace(kv_allocated_len=20),
            sampling_params=params,
        )
        requests.append(
            RequestRound(req, one, row, 10, 1, output_len=1, grammar=grammar)
        )
    more = {"num_running": len(requests)} | more
    return Round(SimpleNamespace(tree_cache=None), requests, **more)


def plan_round(plan: RoundPlanner, *states: RequestState, **more) -> Round:
    round = make_round(*states, **more)
    plan.plan(round)
    return round


def all_windows(round: Round) -> list[int]:
    return [r.window for r in round]


def test_the_head_of_an_answer_is_drafted_alone():
    """Red if a whole draft is lost where the target begins in other words, or if a
    request without a head, or in exact mode, drafts no more than one."""
    plan = planner(head_steps=0, adaptive=False)
    states = [state(exact_head=9), state(), state("exact", exact_head=9)]
    round = plan_round(plan, *states)
    head = 9 - round.requests[0].output_len
    assert all_windows(round) == [head, 32, 32] and 0 < head < 9


@pytest.mark.parametrize("num", [1, 8, 13, 16, 20])
def test_drafts_and_bonus_tokens_are_the_rows_of_a_pass(num):
    """Red if a pass has more rows than one may have, where each request adds one."""
    plan = planner(head_steps=0, adaptive=False)
    plan.slots.max_rows = 16
    windows = all_windows(plan_round(plan, *(state("exact") for _ in range(num))))
    assert not any(windows) or num + sum(windows) <= 16
    assert any(windows) == (num <= 6)


def test_stops_shorten_a_round():
    """Red if one request's stops, looked for behind every token of a round, hold all
    others up, or stops that take no time shorten rounds."""

    def longest(strings=0, expressions=0, match=3) -> int:
        stops = (["a"] * strings, ["a"] * expressions, match)
        (r,) = make_round(state(), stops=stops)
        return longest_draft(r.req)

    unbounded = 1 << 30
    assert longest() == unbounded
    assert longest(1) == longest(8) == longest(expressions=1) == 8192
    assert longest(expressions=16) == 512
    assert longest(1, match=4000) == 256
    assert longest(expressions=1, match=unbounded) == 256
    assert longest(expressions=16, match=unbounded) == 16
    assert longest(expressions=99, match=unbounded) == 8
    stops = ([], ["a*"] * 16, unbounded)
    assert all_windows(plan_round(planner(), state(), stops=stops)) == [16]


def test_a_draft_phase_is_bounded_only_while_somebody_waits():
    """Red if a request that waits for its prefill does not end a draft phase, if the
    bound shortens drafts themselves, or phases that nobody waits for."""
    plan = planner(max_round_ms=70, head_steps=0)
    plan.gate.choose = lambda one: (Choice(5), "why")
    for _ in range(4):
        for steps in (8, 16, 64):
            plan.gate.costs.draft.add(7.0 * steps, 1, steps, steps, 0)
            plan.gate.costs.verify.add(30.0, 1, steps, 1)
    waited = plan_round(plan, state(), num_waiting=3)
    alone = plan_round(plan, state())
    assert waited.most_draft_steps in (9, 10) and alone.most_draft_steps > 1000
    assert all_windows(waited) == all_windows(alone) == [5]
    assert waited.reason == "why"
    free = planner(max_round_ms=0, head_steps=0)
    chosen(free, Choice(5))
    assert plan_round(free, state(), num_waiting=3).most_draft_steps > 1000


def test_a_neighbour_without_drafts_shortens_phases_and_no_drafts():
    """Red if a request that nobody drafts for waits for whole drafts of others, or has
    these drafted shorter; or if fixed windows depend on who runs beside."""
    for adaptive in (False, True):
        plan = planner(adaptive=adaptive, head_steps=0)
        chosen(plan, Choice(32))
        round = plan_round(plan, state(), state("off"))
        assert all_windows(round) == [32, 0]
        assert (round.most_draft_steps == MOST_STEPS) == adaptive
        alone = plan_round(plan, state())
        assert alone.most_draft_steps > 1000


def test_what_is_held_belongs_to_the_draft():
    """Red if a draft that takes several phases is planned anew in each of them, or is
    longer by what a pass left over than what is planned."""
    plan = planner(head_steps=0)
    chosen(plan, Choice(12))
    for held, window in (
        (Draft(), 12),
        (Draft((7,) * 5, parts=(("model", 5),)), 12),  # five of them are drafted
        (Draft((7,) * 5), 5 + 12),  # left over
        (Draft((7,) * 8, parts=(("model", 5),)), 3 + 12),
        (Draft((7,) * 20, parts=(("model", 20),)), 20),
    ):
        (r,) = plan_round(plan, state(draft=held))
        assert r.window == window and r.num_enough >= 6
        assert ("model" in r.budgets) == (len(held.tokens) < window)


def windows(plan: RoundPlanner, *states: RequestState, **more):
    """(window, tokens that the head may write) of each request."""
    round = plan_round(plan, *states, **more)
    for r in round:
        # Behind the head the draft model fills what is left of the window.
        assert r.budgets.get("model", r.window) == r.window
    return [(r.window, r.budgets.get("eagle3", 0)) for r in round]


def fast_plain_rounds(one: RoundPlanner, bs: int = 2) -> None:
    for _ in range(2):
        plain_round(one, bs, 5.0)


def plain_round(one: RoundPlanner, bs: int, ms: float) -> None:
    """One was timed."""
    round = make_round(*[state("off")] * bs)
    round.seconds = {"draft": 0.0, "plain": ms / 1000, "follow": 0.0}
    one.gate.costs.learn(round)


def num_steps(one: RoundPlanner, round: Round) -> int:
    one.plan(round)
    return round.num_steps


def test_several_steps_where_nobody_drafts_or_reads():
    """Red if a round of several steps is planned beside a draft, behind a segment that
    failed, for a head that reads each step, or where slots are short; or if none is
    where they cost least."""
    one = planner(has_model=False, head_steps=0)
    off = [state("off"), state("off")]
    fast_plain_rounds(one)
    long, short = make_round(*off, may_repeat=True), make_round(*off)
    assert num_steps(one, long) == MOST_STEPS
    assert num_steps(one, short) == 1
    # Somebody who waits is let in behind one step.
    waited = make_round(*off, may_repeat=True, num_waiting=1)
    assert num_steps(one, waited) == 1
    for room, steps in ((2 * MOST_STEPS, MOST_STEPS), (2 * MOST_STEPS - 1, 1)):
        one.slots.num_free = lambda *_, room=room: room
        assert num_steps(one, make_round(*off, may_repeat=True)) == steps

    failed = [state("off"), state("off", recovering=1)]
    one = planner(has_model=False, head_steps=0)
    fast_plain_rounds(one)
    assert num_steps(one, make_round(*failed, may_repeat=True)) == 1

    one = planner(has_model=False)
    fast_plain_rounds(one)
    assert num_steps(one, make_round(*off, may_repeat=True)) == 1
    one._num_idle, one.head_rests = IDLE_ROUNDS, True
    one.gate.asks_head = lambda *_: False
    assert num_steps(one, make_round(*off, may_repeat=True)) == MOST_STEPS

    one = planner(head_steps=0)
    fast_plain_rounds(one)
    mixed = make_round(state(), state("off"), may_repeat=True)
    assert num_steps(one, mixed) == 1 and mixed.requests[0].window


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (state(), (32, 0)),
        (state("exact"), (4, 4)),
        (state("off"), (0, 0)),
        (state("exact", hint=False), (32, 0)),
        (state(recovering=1), (32, 4)),
        (state(recovering=REST - 1), (4, 4)),
        (state(recovering=REST - 1, hint=False), (32, 0)),
        (state("exact", draft=Draft((7, 8))), (2, 0)),
        (state(recovering=1, draft=Draft((7, 8))), (32, 0)),
    ],
)
def test_the_head_writes_where_the_target_is_followed(one, expected):
    """Red if the head drafts what is judged by meaning, or the draft model what is
    followed token by token although there is a head."""
    assert windows(planner(adaptive=False), one) == [expected]


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_draft_model_does_not_fill_up_what_the_head_left(adaptive):
    """Red if a chain that the head ended early is written on by the draft model: each
    of its steps costs the round far more than the head's."""
    plan = planner(adaptive=adaptive)
    fast_plain_rounds(plan, bs=1)
    if adaptive:
        plan.gate.asks_head = lambda *_: True
    for one in (state("exact"), state(recovering=REST - 1)):
        (r,) = plan_round(plan, one)
        assert r.window == 4 and r.budgets == {"eagle3": 4}
    (r,) = plan_round(plan, state(recovering=1))
    # With adaptive windows the draft model is tried first, and alone.
    assert set(r.budgets) == ({"model"} if adaptive else {"eagle3", "model"})


def test_without_a_draft_model_the_head_writes_alone():
    """Red if a client's text is no longer tried first, or nobody drafts."""
    alone = planner(has_model=False, adaptive=False)
    one = state("exact", draft=Draft((7,) * 9))
    assert windows(alone, state("exact"), one) == [(4, 4), (9, 0)]
    assert windows(
        planner(has_model=False, head_steps=0), state("exact", hint=False)
    ) == [(0, 0)]


def test_limits_bind_the_head_too():
    """Red if the head drafts past the response, or under a grammar."""
    plan = planner()
    fast_plain_rounds(plan, bs=1)
    assert windows(plan, state("exact"), max_new=4) == [(2, 2)]
    assert windows(plan, state("exact"), max_new=2) == [(0, 0)]
    both = planner(adaptive=False)
    assert windows(both, state("exact"), grammar=object()) == [(32, 0)]


def chosen(plan: RoundPlanner, choice: Choice) -> None:
    plan.gate.choose = lambda one: (choice, "")


def test_a_segment_that_failed_bounds_plain_rounds_only_where_drafts_go_on():
    """Red if a server whose drafts do not pay takes one step a round until each failed
    segment is written; or several where the next draft could begin behind it."""
    plan = planner(head_steps=0)
    fast_plain_rounds(plan, bs=1)
    failed = state(recovering=1)
    chosen(plan, Choice(0))
    assert num_steps(plan, make_round(failed, may_repeat=True)) == MOST_STEPS
    chosen(plan, Choice(32))
    round = make_round(failed, may_repeat=True)
    assert num_steps(plan, round) == 1 and round.requests[0].window


def test_a_paused_draft_model_leaves_its_turn_to_the_head():
    """Red if nobody drafts while the draft model does not pay and the head does, or the
    head drafts where it does not pay either."""
    plan = planner()
    fast_plain_rounds(plan, bs=1)
    chosen(plan, Choice(0))
    plan.gate.asks_head = lambda *_: True
    assert windows(plan, state()) == [(4, 4)]
    plan.gate.asks_head = lambda *_: False
    assert windows(plan, state()) == [(0, 0)]


def test_few_of_many_requests_try_what_nobody_knows():
    """Red if a trial of drafts has every one of many requests draft, if those with long
    texts are read for it, or if other rounds leave somebody out."""
    plan = planner(head_steps=0)
    lens = [50, 20, 40, 30]

    def windows_of(choice: Choice) -> list[int]:
        chosen(plan, choice)
        round = make_round(*[state() for _ in lens])
        for r, n in zip(round, lens, strict=True):
            r.seq_len = n
        plan.plan(round)
        return all_windows(round)

    assert windows_of(Choice(24, writers=2)) == [0, 24, 0, 24]
    assert windows_of(Choice(24, writers=4)) == [24] * 4
    assert windows_of(Choice(24)) == [24] * 4
    # Those in exact mode have their turn after those that are judged.
    chosen(plan, Choice(24, writers=2))
    round = make_round(state("exact"), state(recovering=1), state(), state())
    for r, n in zip(round, (20, 20, 50, 40), strict=True):
        r.seq_len = n
    plan.plan(round)
    assert all_windows(round) == [0, 0, 24, 24]
    one = Gate()
    for bs in (1, 64):
        first, _ = one.choose(Situation(bs, 256, 16))
        assert first.judged and 0 < first.writers * first.steps <= TRIAL_TOKENS


def head_round(plan: RoundPlanner, name: str, num: int, ms: float = 10.0) -> None:
    """A round in which this drafter wrote so many tokens, and one stood."""
    cut, decision = Cut(0, 4, True, exact_end=4), Decision((1,), 0, 0, ())
    round = drafted(state("exact"), 4, cut, decision, judged=False)
    for r in round:
        r.budgets = {name: 4}
        r.draft = Draft().extended(
            name, (1,) * num, ended=False, token_level=name != "model"
        )
    round.num_rows = 5
    round.seconds = {"draft": 0.0, "layout": 0.0, "verify": ms / 1000, "decide": 0.0}
    plan.adapt(round)
    plan.observe(round)


def test_a_head_that_does_not_pay_rests_until_it_is_worth_a_look():
    """Red if a head that does not pay goes on reading, if it is asked while it rests,
    or if it is never tried again."""
    plan = planner(has_model=False)
    fast_plain_rounds(plan, bs=1)
    assert windows(plan, state("exact")) == [(4, 4)]  # nothing is known
    for _ in range(16):
        head_round(plan, "eagle3", 4, ms=20.0)
    assert windows(plan, state("exact")) == [(4, 4)]  # a trial
    head_round(plan, "eagle3", 4, ms=20.0)
    rounds = [plan_round(plan, state("exact")) for _ in range(IDLE_ROUNDS)]
    assert [r.head_rests for r in rounds[-2:]] == [False, True]
    assert windows(plan, state("exact")) == [(0, 0)]
    plan.gate.ms += 1_000_000.0
    for _ in range(IDLE_ROUNDS):
        last = plan_round(plan, state("exact"))
    assert not last.head_rests
    assert windows(plan, state("exact")) == [(4, 4)]


def test_rounds_of_a_head_are_measured():
    """Red if a trial of a head is blind to its own rounds, those whose chains were too
    unsure to be shown among them, or counts others."""
    plan = planner()
    fast_plain_rounds(plan, bs=1)
    for name, num, counted in (
        ("model", 4, 0),
        ("ngram", 4, 0),
        ("eagle3", 4, 1),
        ("eagle3", 0, 2),
    ):
        head_round(plan, name, num)
        assert plan.gate.costs.head.count == counted


def test_a_heads_time_is_its_own():
    """Red if what the draft model wrote meanwhile for other requests counts as a head's
    time."""
    plan = planner()
    costs = plan.gate.costs
    for _ in range(50):
        costs.draft.add(16.0, 1, 16, 16, 0)
    for num_steps in (0, 16, 16, 0):
        round = make_round(state("exact"), num_draft_steps=num_steps, num_rows=5)
        draft_ms = 2.0 + num_steps
        round.seconds = {"draft": draft_ms / 1000, "verify": 0.008}
        costs.learn(round, by_head=True)
    assert costs.head.ms(1, 5, 1) == pytest.approx(10.0, rel=0.02)


def test_a_few_of_many_requests_do_not_decide_a_trial():
    """Red if a head that can draft for few of the running requests is measured."""
    for num_able, asked in ((3, False), (4, True)):
        plan = planner(has_model=False)
        fast_plain_rounds(plan, bs=8)
        able = [state("exact", hint=k < num_able) for k in range(8)]
        assert any(w for w, _ in windows(plan, *able)) == asked


@pytest.mark.parametrize(("max_new", "learns"), [(8, False), (9, True)])
def test_the_servers_own_first_request_teaches_nothing(max_new, learns):
    """Red if windows of a fresh server are short because a draft failed on SGLang's
    first prompt, which has an answer of eight tokens."""
    plan, one = planner(head_steps=0), state()
    round = drafted(one, 6, Cut(0, 6, False, 6), Decision((1,), 0, 0, ()))
    for r in round:
        r.req.sampling_params.max_new_tokens = max_new
    plan.adapt(round)
    assert (plan.gate.accept.valid.num_ends > 0) == learns
    assert one.num_suspect == 5


@pytest.mark.parametrize(("spacings", "every"), [((2, 2), 2), ((0, 0), 0), ((2, 3), 0)])
def test_a_spacing_of_verdicts_that_is_set_is_planned_with(spacings, every):
    """Red if windows are chosen for a spacing that an option overrides."""
    plan, seen = planner(head_steps=0), []
    plan.gate.choose = lambda now: seen.append(now) or (Choice(8), "")
    plan_round(plan, *(state(every=one) for one in spacings))
    assert [now.every for now in seen] == [every]


def test_a_head_that_cannot_draft_does_not_rest():
    """Red if an answer under a grammar takes the head from the request behind it."""
    plan = planner(has_model=False)
    fast_plain_rounds(plan, bs=1)
    plan.gate.asks_head = lambda *_: True
    for _ in range(IDLE_ROUNDS + 1):
        last = plan_round(plan, state("exact"), grammar=object())
    assert not last.head_rests
    assert windows(plan, state("exact")) == [(4, 4)]


def test_where_verdicts_do_not_pay_the_head_drafts():
    """Red if a semantic request is followed token by token behind the draft model
    although there is a head, or what is pending is lost to it."""
    plan = planner()
    chosen(plan, Choice(6, judged=False))
    assert windows(plan, state(), state(hint=False)) == [(4, 4), (6, 0)]
    round = plan_round(plan, state(draft=Draft((7, 8))))
    assert not round.judged and all_windows(round) == [2]
    assert "eagle3" not in round.requests[0].budgets


def test_a_short_recovery_is_left_to_the_head():
    """Red if the draft model writes on behind a head whose tokens may not stand."""
    plan = planner()
    chosen(plan, Choice(32, recovery=8))
    assert windows(plan, state(recovering=1)) == [(4, 4)]
    assert windows(plan, state(recovering=1, hint=False)) == [(8, 0)]


def test_recovery_by_the_draft_model_where_that_is_faster():
    """Red if the head writes where it gives less, or if the draft model then writes for
    requests in exact mode as well."""
    plan = planner()
    chosen(plan, Choice(32, recovery=8, by_head=False))
    assert windows(plan, state(recovering=1)) == [(8, 0)]
    assert windows(plan, state(), state(recovering=1)) == [(32, 0), (8, 0)]
    assert windows(plan, state("exact"), state(recovering=1)) == [(4, 4), (8, 0)]
    assert windows(plan, state(recovering=REST - 1)) == [(4, 4)]


@pytest.mark.parametrize(("ms", "by_head"), [(20.0, False), (3.0, True)])
def test_both_ways_to_recover_are_tried(ms, by_head):
    """Red if the draft model or the head is left out before anyone knows what it gives,
    or if the slower one writes on. A draft step takes 1 ms, a pass 8 and more."""
    plan = planner()
    gate, now = plan.gate, Situation(1, most=32, suffix_len=4, chain=4)
    fast_plain_rounds(plan, bs=1)
    gate.accept.boundary.observe(ENOUGH_DRAFTED, 40)
    for _ in range(50):
        gate.costs.draft.add(16.0, 1, 16, 16, 0)
        gate.costs.verify.add(8.0, 1, 17, 1)

    def choice() -> Choice:
        gate.ms += 1_000.0
        one, _ = gate.choose(now)
        assert one.judged and one.recovery
        return one

    assert not choice().by_head
    # Of eight tokens after a rejection seven stand.
    for _ in range(ENOUGH_REWRITTEN // 8):
        cut, decision = Cut(0, 8, True, exact_end=8), Decision((1,) * 8, 0, 7, ())
        plan.adapt(drafted(state(recovering=1), 8, cut, decision, judged=True))
    assert choice().by_head
    for _ in range(ENOUGH_HEADED):
        head_round(plan, "eagle3", 4, ms=ms)
    assert choice().by_head == by_head


def test_failed_segments_do_not_speak_against_the_draft_model():
    """Red if what disagrees soon, because a verdict failed on it, counts where the head
    and the draft model are compared."""
    plan = planner()
    cut, decision = Cut(4, 12, False, 12), Decision((1,) * 6, 4, 1, ())
    plan.adapt(drafted(state(), 16, cut, decision))
    accept = plan.gate.accept
    assert accept.followed.num_seen > 0 == accept.rewritten.num_seen


def test_verdicts_are_left_out_only_where_the_tail_is_exact():
    """Red if a request without the exact tail, or a client's text, could lose its
    verdicts to measured times."""
    asked = []
    plan = planner(head_steps=0)
    plan.gate.choose = lambda one: asked.append(one) or (Choice(8), "")
    plan_round(plan, state())
    plan_round(plan, state(), state(exact_tail=False))
    plan_round(plan, state(client=object()))
    plan_round(plan, state("exact"))
    assert [(a.can_judge, a.can_follow) for a in asked] == [
        (True, True), (True, False), (True, False), (False, True),
    ]  # fmt: skip


def test_ranks_do_what_the_first_of_them_chose():
    """Red if a rank plans from its own clock, or from what it has learnt itself: a rank
    that drafts one token more than the others ends the server."""
    first, other = planner(head_steps=0), planner(head_steps=0)
    told = []
    first.ranks.agree_all = lambda lists: told.append(lists) or lists
    other.ranks.agree_all = lambda lists: next(replies)
    for rank, every, steps in ((first, 2, 20), (other, 3, 21)):
        choice = Choice(steps, every=every)
        rank.gate.choose = lambda _, choice=choice: (choice, "")
    one, two = state(), state()
    # It has drafted slowly, and would end the phase elsewhere.
    other.max_round_ms = 10
    for _ in range(4):
        for steps in (8, 32):
            other.gate.costs.draft.add(9.0 * steps, 1, steps, 2 * steps, 0)
            other.gate.costs.verify.add(30.0, 1, steps, 2)
    rounds = [plan_round(first, one, two, num_waiting=1)]
    replies = iter(told)
    rounds.append(plan_round(other, one, two, num_waiting=1))
    assert len(told) == 2  # each time, the others are waited for
    assert rounds[0].most_draft_steps == rounds[1].most_draft_steps > 1
    assert rounds[0].most_idle_steps == rounds[1].most_idle_steps
    assert rounds[0].most_read == rounds[1].most_read
    assert all_windows(rounds[1]) == all_windows(rounds[0]) == [20, 20]
    assert [round.judge_every for round in rounds] == [2, 2]


def drafted(
    one: RequestState, num_new: int, cut: Cut, decision: Decision, judged: bool = True
) -> Round:
    """A round of one request in which the draft model wrote `num_new` tokens."""
    round = make_round(one, judged=judged)
    (r,) = round
    r.draft = Draft((1,) * num_new, parts=(("model", num_new),))
    r.segments = Segments((num_new,), num_found=num_new // 8)
    r.kept = Kept(cut, decision)
    return round


def adapted(one: RequestState, *, kept: int, rejected_end: int = 0) -> None:
    """A judged round of 16 drafted tokens."""
    cut = Cut(kept, kept, False, rejected_end)
    decision = Decision((1,) * (kept + 1), cut.num_kept, kept - cut.num_kept, ())
    planner().adapt(drafted(one, 16, cut, decision))


def test_the_rejected_part_of_a_draft_stays_suspect():
    """Red if, after a verdict over several segments has failed, the wrong one among
    them is looked for by verdicts that cover several again."""
    one = state()
    adapted(one, kept=4, rejected_end=12)
    assert one.num_suspect == 12 - 5
    adapted(one, kept=3)
    assert one.num_suspect == 7 - 4
    adapted(one, kept=16)
    assert one.num_suspect == 0


def test_a_segment_that_failed_with_others_counts_once():
    """Red if the search for the wrong segment makes the draft look worse than it is."""
    plan, one = planner(), state()
    counted = []
    for rejected_end in (36, 12, 24):
        cut = Cut(0, rejected_end, False, rejected_end)
        plan.adapt(drafted(one, 36, cut, Decision((1,) * 3, 0, 2, ())))
        counted.append(plan.gate.accept.valid.num_ends)
    assert counted == [1, 1, 2]
