"""Clients' texts judged behind their prompts, over steps of the scheduler."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.client_texts import client_drafts as client_text
from sglang_parse.client_texts.client_drafts import fitting
from sglang_parse.client_texts.client_pass import ClientPass
from sglang_parse.client_texts.verifications import MAX_VERIFY_SECONDS
from sglang_parse.drafting.drafter import Prefill, PrefillRequest
from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.requests.client_text import ClientText
from sglang_parse.sgl.fast_paths import PassFailed
from tests.support.fake_engine import LINE, FakeServer, FakeTarget, make_request

PROMPT = (10, 11, 12, 13, 14)
TEXT = (21, LINE, 22, LINE, 23, LINE)  # three segments of two tokens
OWN = 30  # the target's own token, whatever stands before


class Req(SimpleNamespace):
    """SGLang's request; a weak key like it."""

    __hash__ = object.__hash__


class Pool:
    """`free` of `size` KV slots; a pass that asks for more would stop the scheduler."""

    page_size = 1

    def __init__(self, free: int, size: int, max_rows: int) -> None:
        self.free, self.num_slots, self.max_rows = free, size, max_rows

    def num_free(self, tree_cache, num_rows=0) -> int:
        return self.free

    def extend_rows(self, batch, lens) -> None:
        self._set(batch, lens, max)

    def trim_rows(self, batch, lens) -> None:
        self._set(batch, lens, min)

    def _set(self, batch, lens, pick) -> None:
        for req, n in zip(batch.reqs, lens, strict=True):
            held = req.kv.kv_allocated_len
            req.kv.kv_allocated_len = pick(held, n)
            self.free -= req.kv.kv_allocated_len - held
        assert self.free >= 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Target(FakeTarget):
    """Checks what each pass asks for; it takes `seconds` of the clock."""

    def __init__(self, judge, pool: Pool, clock: Clock) -> None:
        super().__init__(lambda tokens: OWN, judge)
        self.pool, self.clock, self.seconds = pool, clock, 0.0

    def verify(self, round, plan):
        assert plan.num_suffix_tokens <= self.pool.free
        assert plan.num_verify_tokens <= self.pool.max_rows
        assert all(r.bonus_token == PROMPT[-1] and r.seq_len == 4 for r in round)
        assert [r.row for r in round] == [10 + r.req.place for r in round]
        self.clock.now += self.seconds
        # The one token that a request has while it waits stands in no pass.
        held = [r.req.output_ids for r in round]
        for r in round:
            r.req.output_ids = []
        found = super().verify(round, plan)
        for r, output in zip(round, held, strict=True):
            r.req.output_ids = output
        return found


class World:
    """A prefill of requests with texts, and the decode steps behind it.

    Scores rise with the length of the prefix, so that their order tells whose they
    are.
    """

    def __init__(
        self, *, free=400, size=400, max_rows=10_000, step_rows=10_000, judge=None
    ) -> None:
        self.pool, self.clock = Pool(free, size, max_rows), Clock()
        judge = judge or (lambda tokens: 0.5 + len(tokens) / 1000)
        self.target = Target(judge, self.pool, self.clock)
        server = FakeServer(self.target, [], slots=self.pool)
        self.engine = server.engine
        self.held: list[object] = []
        self.barred: list[object] = []
        self.released: list[object] = []
        self.reqs: list[Req] = []
        self.passes = ClientPass(
            server.engine,
            context_len=1000,
            view=lambda batch, index: SimpleNamespace(
                reqs=[batch.reqs[i] for i in index], tree_cache=None
            ),
            refuse=refuse,
            bar=self.barred.append,
            hold=self.held.append,
            release=self.released.append,
            step_rows=step_rows,
            clock=self.clock,
        )

    @property
    def plans(self) -> list:
        return self.target.plans

    @property
    def batch(self) -> SimpleNamespace:
        rows = 10 + torch.arange(len(self.reqs))
        return SimpleNamespace(
            reqs=self.reqs, tree_cache=None, req_pool_indices_cpu=rows
        )

    def add(
        self, text=TEXT, *, verify: bool, ends=None, suffix_len: int = 10, **more
    ) -> Req:
        """A request with a prompt of 5 tokens that a prefill has computed."""
        asked = {"verify": "x"} if verify else {"draft": "x"}
        made = make_request(
            prompt=PROMPT, output=(), client=ClientText(text, ends), **asked, **more
        )
        req = Req(**vars(made))
        req.refusal, req.place = None, len(self.reqs)
        req.state.judge = JudgePrompt((7,) * suffix_len, ((0, 1),))
        req.records = []
        req.state.report = SimpleNamespace(
            record=req.records.append, record_plain=lambda *told: None
        )
        self.reqs.append(req)
        return req

    def prefill(self, num_computed: int = len(PROMPT)) -> dict[int, int]:
        """The first token of each request whose text becomes output, by its place.
        All requests get a token, as at the end of a prefill. num_computed: tokens of
        each prompt that the radix cache did not have."""
        num_cached = len(PROMPT) - num_computed
        prompts = [
            PrefillRequest(
                req, req.state, 10 + i, num_cached=num_cached, num_computed=num_computed
            )
            for i, req in enumerate(self.reqs)
        ]
        first = dict(self.passes.begin(Prefill(self.batch, prompts)))
        for i, req in enumerate(self.reqs):
            req.output_ids = [first.get(i, OWN)]
        return first

    def step(self) -> int:
        """A decode step for those that wait. Returns the passes that it took."""
        before = len(self.plans)
        self.passes.go_on(self.batch, [req.state for req in self.reqs])
        return len(self.plans) - before


def refuse(req, refusal) -> None:
    assert req.refusal is None, "it is refused twice"
    req.refusal = req.to_finish = refusal


def verify(ends=(2, 4, 6), suffix_len=10, **world) -> tuple[World, Req]:
    """One text that is judged alone, behind its prefill."""
    here = World(**world)
    req = here.add(ends=ends, verify=True, suffix_len=suffix_len)
    here.prefill()
    return here, req


def test_where_no_pass_can_run_a_text_is_refused():
    """Red if a text that nothing can judge ends the server, or waits for ever."""
    here = World()

    def broken(*_):
        raise PassFailed("no verify route is left")

    here.passes.engine.verify = broken
    alone = here.add(ends=(2, 4), verify=True)
    kept = here.add(verify=False)
    here.prefill()
    assert "cannot be judged, because no verify route" in str(alone.refusal)
    assert "PassFailed" in str(kept.refusal)
    assert not here.step()


@pytest.mark.parametrize("num_computed", [1, 2])
@pytest.mark.parametrize("case", ["refused", "waits", "broken"])
def test_a_prompt_without_a_pass_is_not_shared(case, num_computed):
    """Red if a prompt whose last token is left to a pass (`PrefillEngine`) reaches the
    radix cache although no pass has run: others would read a slot that holds no KV.
    Or if one stays out of it whose KV is complete."""
    more = {"refused": {"max_rows": 7}, "waits": {"step_rows": 40}, "broken": {}}
    world = World(**more[case])
    if case == "broken":

        def broken(*_):
            raise PassFailed("no verify route is left")

        world.passes.engine.verify = broken
        bad = [world.add(verify=False), world.add(ends=(2, 4), verify=True)]
    elif case == "refused":
        bad = [world.add(verify=True)]
    else:
        world.add(ends=(2, 4, 6), verify=True)
        bad = [world.add(ends=(2, 4, 6), verify=True)]
    world.prefill(num_computed)
    assert world.barred == (bad if num_computed == 1 else [])


def test_prompts_with_a_pass_are_shared():
    """Red if texts that are judged at once cost the radix cache their prompts."""
    world = World()
    world.add(verify=True)
    world.add(verify=False)
    world.prefill(1)
    assert world.barred == []


# -- What fits ---------------------------------------------------------------------


def test_passes_cover_every_boundary_in_order():
    """Red if a boundary is judged twice, or not at all, where a pass has no room."""
    left, passes = tuple(range(1, 12)), []
    while left:
        passes.append(fitting(left, suffix_len=20, room=55))
        assert 1 + passes[-1][-1] + 20 * len(passes[-1]) <= 55
        left = left[len(passes[-1]) :]
    assert [len(p) for p in passes] == [2, 2, 2, 2, 2, 1]
    assert sum(passes, ()) == tuple(range(1, 12))
    assert fitting((), 20, 55) == fitting((1, 2), 20, 21) == ()


def test_texts_that_fit_are_judged_together():
    """Red if a request is refused for another's text, or a pass gets too long."""
    # 17 rows for each; a quarter of a pass is left.
    for max_rows, together in ((68, [3]), (46, [2, 1]), (24, [1, 1, 1])):
        world = World(max_rows=max_rows)
        reqs = [world.add(verify=False) for _ in range(3)]
        assert list(world.prefill()) == [0, 1, 2]
        assert [len(p.seq_lens) for p in world.plans] == together
        assert all(req.records[0].num_judged for req in reqs)


def test_what_a_pass_keeps_takes_its_slots_from_the_next_one():
    """Red if a second text is cut to slots that the first one has taken by then: the
    pass finds none, which stops the scheduler."""
    text = (21, LINE) * 20
    world = World(free=80)
    first, second = (world.add(text, verify=False, suffix_len=1) for _ in range(2))
    assert list(world.prefill()) == [0, 1] and len(world.plans) == 2
    assert len(first.records[0].accept_tokens) == 41
    assert 0 < len(second.records[0].draft_tokens) < len(text)
    assert first.refusal is second.refusal is None and world.pool.free >= 0


def test_text_longer_than_a_pass_is_refused():
    """Red if one request can ask for more activations than there is memory for."""
    _, req = verify(max_rows=7)
    assert req.refusal.status == 400
    assert "parse_verify has 6 tokens and there is room for 5" in str(req.refusal)
    assert "at most 7 (--chunked-prefill-size)" in str(req.refusal)


def test_text_that_never_fits_is_refused_at_once():
    """Red if a client waits for room that there never is."""
    _, req = verify(free=7, size=11)
    assert req.refusal.status == 400  # the prompt's own slots are never free
    _, req = verify(free=7, max_rows=7)
    assert req.refusal.status == 400
    assert "room for 5 behind this prompt" in str(req.refusal)


def test_a_text_of_which_no_suffix_ever_fits_is_refused():
    """Red if a client waits for room that there never is."""
    _, req = verify(size=400, suffix_len=400)
    assert req.refusal.status == 400
    assert "judge suffix has 400 tokens and there is room for 388" in str(req.refusal)
    _, req = verify(free=10, size=15)
    assert req.refusal.status == 400
    assert "shorten custom_params.parse_judge_suffix" in str(req.refusal)


def test_a_kept_text_has_a_slot_for_what_follows():
    """Red if the two tokens behind a text that is kept whole have none: SGLang reserves
    by what it knows, the prompt, and a full pool then stops the scheduler."""
    world = World()
    req = world.add(verify=False)
    asked = []
    extend = world.pool.extend_rows
    world.pool.extend_rows = lambda b, lens: (asked.append(lens), extend(b, lens))
    world.prefill()
    assert asked == [[5 + 6 + 2]]
    assert req.kv.kv_allocated_len == 5 + 6 + 1
    # Where nothing can be had, nothing is asked for.
    world = World(free=0)
    req = world.add(verify=False)
    assert world.prefill() == {0: OWN}
    assert req.kv.kv_allocated_len == 5


def test_a_text_that_takes_too_many_passes_is_refused(monkeypatch):
    """Red if one request holds the scheduler for hundreds of passes, or is refused for
    what others occupy now."""
    ends = (1, 2, 3, 4, 5, 6)
    monkeypatch.setattr(client_text, "MAX_VERIFY_ROWS", 40)
    world, req = verify(ends, max_rows=17)
    assert req.refusal.status == 400 and world.plans == []
    assert "6 verdicts, which take 6 passes" in str(req.refusal)
    monkeypatch.setattr(client_text, "MAX_VERIFY_ROWS", 70)
    for free, num in ((400, 1), (20, 6)):
        world, req = verify(ends, free=free)
        while req.state.verification is not None:
            assert world.step() == 1
        assert req.refusal is None and len(world.plans) == num
        assert len(req.records[0].scores) == 6


def test_what_gets_an_error_is_not_judged():
    """Red if a refused text still holds the scheduler for its passes, or its neighbour
    is refused with it."""
    world = World(max_rows=40)
    bad, good = world.add((21,) * 50, verify=True), world.add(verify=True)
    world.prefill()
    assert bad.refusal.status == 400 and good.refusal is None
    assert world.held == [] and bad.state.verification is None
    assert [len(p.seq_lens) for p in world.plans] == [1] and good.records


def test_a_draft_that_takes_too_many_passes_is_judged_in_part():
    """Red if it is refused as if it were a text to verify, or a step takes more passes
    than one for it."""
    world = World(max_rows=17)
    req = world.add(verify=False)
    first = world.prefill()
    assert req.refusal is None and len(world.plans) == 1 and first == {0: 21}
    (record,) = req.records
    assert record.boundaries == (2,) and record.accept_tokens == (21, LINE, OWN)


def test_stop_expressions_bound_a_client_s_text_too():
    """Red if all of a long text is sent in one round: SGLang looks for each expression
    behind every token of it."""
    text = (21, LINE) * 20
    for num_stops, asked, expected in ((1, False, 40), (99, False, 8), (99, True, 40)):
        world = World()
        req = world.add(text, verify=asked)
        req.sampling_params.stop_regex_strs = ["a*"] * num_stops
        req.sampling_params.stop_regex_max_len = 1 << 30
        world.prefill()
        assert len(req.records[0].draft_tokens) == expected


@pytest.mark.parametrize("ends", [(0, 2, 6), (2, 2, 6), (2, 6, 6)])
def test_a_segment_without_tokens_is_refused(ends):
    """Red if a segment that the tokenizer drops stops the scheduler."""
    world, req = verify(ends)
    place = [0, *ends].index(next(e for e in (0, *ends) if (0, *ends).count(e) > 1))
    assert req.refusal.status == 400 and world.plans == []
    assert f"parse_verify[{place}] has no tokens" in str(req.refusal)


# -- Texts that become output ------------------------------------------------------


def test_kept_text_is_sent_from_its_first_token():
    """Red if the target's first token goes out before a judged text."""
    world = World(free=60)
    req = world.add(verify=False)
    assert world.prefill() == {0: 21}
    assert req.state.ready == (*TEXT[1:], OWN)
    assert req.kv.kv_allocated_len == 5 + 7
    assert req.records[0].num_judged == 6 and req.refusal is None
    assert world.held == world.released == []


def test_a_rejected_text_is_kept_up_to_its_valid_prefix():
    """Red if a wrong segment of a client is sent, or the target does not write on."""
    world = World(judge=lambda tokens: 0.1 if 22 in tokens else 0.9)
    req = world.add(verify=False)
    assert world.prefill() == {0: 21}
    assert req.state.ready == (LINE, OWN) and req.state.recovering == 1
    assert req.state.pending == ()
    assert req.kv.kv_allocated_len == 5 + 3


def test_what_was_not_judged_waits_for_the_next_round():
    """Red if a text is lost behind the verdicts that there was room for."""
    target = (21, LINE, 22)
    world = World(max_rows=17)
    world.target.own = lambda tokens: target[len(tokens) - len(PROMPT)]
    req = world.add(verify=False)
    world.prefill()
    assert req.state.ready == (LINE, 22)
    assert (req.state.pending, req.state.draft.num_client) == (TEXT[3:], 3)


def test_a_kept_text_without_room_for_one_suffix_is_not_kept():
    """Red if such a request stops the scheduler, or an unjudged text is kept."""
    world = World(free=9)
    req = world.add(verify=False)
    assert world.prefill() == {0: OWN} and req.state.ready == ()
    assert world.plans[0].num_suffix_tokens == 0
    assert req.records[0].num_judged == 0 and req.records[0].scores == ()


@pytest.mark.parametrize("num_texts", [1, 3])
def test_a_kept_text_holds_what_its_next_round_needs(num_texts):
    """Red if the round behind a text that was kept whole finds no slot for its token
    and the one behind it, where others took all the rest: SGLang, which knows of the
    prompt alone, has reserved none, and the server ends."""
    for free in range(60):
        world = World(free=free, judge=lambda tokens: 0.99)
        reqs = [world.add(verify=False) for _ in range(num_texts)]
        # What is spare stays with a request, up to what SGLang reserves.
        world.pool.trim_rows = lambda *_: None
        world.prefill()
        for req in reqs:
            wanted = len(PROMPT) + len(req.state.ready) + 2
            assert wanted <= max(req.kv.kv_allocated_len, len(PROMPT) + 4)


def test_a_kept_text_that_fails_ends_alone():
    """Red if our own error over one text costs another request its tokens, or a token
    of the failed one goes out."""
    world = World()
    bad, good = (world.add(verify=False) for _ in range(2))
    recover = world.engine.segmenting.recover

    def fails(r):
        if r.req is bad:
            raise KeyError("x")
        recover(r)

    world.engine.segmenting.recover = fails
    assert world.prefill() == {1: 21}
    assert bad.refusal.status == 500 and good.refusal is None
    assert bad.state.ready == () and good.state.ready == (*TEXT[1:], OWN)


def test_drafters_hear_of_kept_texts_alone():
    """Red if a drafter is told of tokens of a text that is only judged, or not of the
    slots that a kept one has taken."""
    heard = []
    world = World()
    kept, judged = world.add(verify=False), world.add(verify=True)
    world.engine.drafters.after_pass = lambda round: heard.extend(round)
    world.prefill()
    assert [r.req for r in heard] == [kept]
    assert heard[0].seq_len == 4 and heard[0].decision.accept_tokens[:6] == TEXT
    assert heard[0].root_row == 0 and judged.state.ready == ()


# -- Texts that are judged alone ---------------------------------------------------


@pytest.mark.parametrize(
    ("room", "num_passes"),
    [
        *(({"free": 17}, 3), ({"free": 25}, 2), ({"free": 37}, 1)),
        *(({"max_rows": 17}, 3), ({"max_rows": 28}, 2), ({"max_rows": 1000}, 1)),
    ],
)
def test_what_does_not_fit_into_a_pass_takes_more_of_them(room, num_passes):
    """Red if a pass asks for more slots or rows than there are, suffix rows are not
    counted among them, passes after the first run before other requests were served,
    or a verdict is lost or told of another segment."""
    world, req = verify(**room, judge=lambda t: 0.2 + len(t) / 100)
    for _ in range(num_passes - 1):
        assert req.state.verification is not None and world.step() == 1
    assert req.state.verification is None and req.refusal is None
    (record,) = req.records
    assert record.num_passes == len(world.plans) == num_passes
    assert record.boundaries == (2, 4, 6)
    expected = [0.2 + (5 + end) / 100 for end in (2, 4, 6)]
    assert record.scores == pytest.approx(expected, abs=1e-5)
    assert (record.accept_tokens, record.draft_tokens) == ((), TEXT)
    assert req.output_ids == [OWN]
    assert world.pool.free == room.get("free", 400) and req.kv.kv_allocated_len == 5


def test_its_own_threshold_says_how_much_of_it_is_valid():
    """Red if what is reported as valid is not what would have been kept."""
    judge = {7: 0.9, 9: 0.4, 11: 0.8}
    for more, expected in (
        ({}, 2),
        ({"keep_rule": "longest"}, 6),
        ({"threshold": 0.3}, 6),
    ):
        world = World(max_rows=17, judge=lambda tokens: judge[len(tokens)])
        req = world.add(ends=(2, 4, 6), verify=True, **more)
        world.prefill()
        while req.state.verification is not None:
            world.step()
        assert req.records[0].num_judged == expected


def test_each_step_takes_one_pass_however_many_wait():
    """Red if texts that are judged hold up those that decode, or one text's passes keep
    another from its first."""
    world = World(max_rows=34)
    reqs = [world.add(verify=True) for _ in range(3)]
    world.prefill()
    assert len(world.plans) == 1
    steps = 1
    while any(r.state.verification is not None for r in reqs):
        assert world.step() == 1
        steps += 1
    assert len(world.plans) == steps
    assert all(len(r.records[0].scores) == 3 and r.refusal is None for r in reqs)
    assert world.step() == 0


def test_a_request_is_held_until_its_last_verdict():
    """Red if SGLang ends it before, or never; one that is complete at once needs
    neither."""
    world, req = verify(max_rows=17)
    assert world.held == [req] and world.released == []
    world.step()
    assert world.released == [] and req.records == []
    world.step()
    assert world.released == [req] and world.held == [req]
    world, req = verify()
    assert world.held == [] and world.released == [req]


def test_texts_to_keep_and_to_judge_share_a_pass():
    """Red if a prefill with both kinds takes two passes although they fit into one, or
    a place of the batch gets another's tokens."""
    world = World()
    judged, kept = world.add(verify=True), world.add(verify=False)
    assert world.prefill() == {1: 21} and len(world.plans) == 1
    assert kept.records[0].num_judged == 6 and len(judged.records[0].scores) == 3
    # Where room is short, what is sent comes first.
    world = World(max_rows=40)
    judged, kept = world.add(verify=True), world.add(verify=False)
    assert world.prefill() == {1: 21} and len(world.plans) == 1
    assert kept.records[0].num_judged == 6
    assert judged.state.verification is not None and world.held == [judged]


def test_a_text_waits_for_room_beside_other_requests():
    """Red if a text that fits is refused for what others occupy now, its passes stop
    the scheduler, or it is not judged once there is room."""
    world, req = verify(free=10)
    assert req.refusal is None and world.plans == [] and world.held == [req]
    for _ in range(5):
        world.clock.now += 10
        assert world.step() == 0 and req.refusal is None
    world.pool.free = 50
    assert world.step() == 1
    assert world.released == [req] and len(req.records[0].scores) == 3


def test_a_text_that_waits_too_long_is_to_be_sent_again():
    """Red if a client waits for ever for room that others keep."""
    world, req = verify(free=10)
    world.clock.now += MAX_VERIFY_SECONDS - 1
    world.step()
    assert req.refusal is None
    world.clock.now += 2
    assert world.step() == 0
    assert req.refusal.status == 503 and "waited 121 s for room" in str(req.refusal)
    assert str(req.refusal).endswith("send the request again later.")
    assert req.state.verification is None and world.released == []


def test_only_time_without_a_pass_counts_as_waiting():
    """Red if a text whose verdicts come is turned away at the first step without
    room, because it was sent a while ago."""
    world, req = verify(max_rows=17)
    for _ in range(2):
        world.clock.now += MAX_VERIFY_SECONDS - 1
        free, world.pool.free = world.pool.free, 0
        assert world.step() == 0 and req.refusal is None
        world.pool.free = free
        world.step()
    assert req.state.verification is None and req.refusal is None


def test_a_text_whose_passes_take_too_long_is_refused():
    """Red if one request costs the server minutes of passes."""
    world = World(max_rows=17)
    req = world.add(ends=(1, 2, 3, 4, 5, 6), verify=True)
    world.target.seconds = 50.0
    world.prefill()
    world.step()
    assert req.refusal is None
    world.step()
    assert req.refusal.status == 400 and len(world.plans) == 3
    assert "asks for 6 verdicts and 3 of them took 150 s" in str(req.refusal)
    assert "at most 120 s" in str(req.refusal)
    assert req.state.verification is None and world.released == []
    assert world.step() == 0
    # The last verdict is told, however long it took.
    world = World()
    req = world.add(verify=True)
    world.target.seconds = 500.0
    world.prefill()
    assert req.refusal is None and len(req.records[0].scores) == 3


def test_ranks_end_a_request_together():
    """Red if each rank goes by its own clock: the others would wait for ever for one
    that has refused the request."""
    for free, max_rows in ((10, 10_000), (400, 17)):
        world = World(free=free, max_rows=max_rows)
        req = world.add(verify=True)
        world.engine.ranks.agree_all = lambda lists: [
            (1,) if isinstance(v[0], int) else tuple(v) for v in lists if v
        ]
        world.prefill()
        assert req.refusal is not None, "the first rank has measured too long"
        world = World(free=free, max_rows=max_rows)
        req = world.add(verify=True)
        world.target.seconds = 500.0
        world.engine.ranks.agree_all = lambda lists: [
            (0,) if isinstance(v[0], int) else tuple(v) for v in lists if v
        ]
        world.prefill()
        world.clock.now += 500.0
        world.step()
        assert req.refusal is None, "the first rank has not"


def test_a_request_that_is_aborted_while_it_waits_is_not_judged():
    """Red if a client that has gone still costs passes."""
    world, req = verify(max_rows=17)
    req.to_finish = "aborted"
    assert world.step() == 0
    assert req.state.verification is None and world.released == []


def test_nothing_kept_between_steps_refers_to_a_request():
    """Red if a request that is retracted or aborted while it waits is never freed."""
    world, req = verify(max_rows=17)
    state = req.state
    assert state.verification is not None
    gone = weakref.ref(req)
    del req
    world.reqs.clear()
    world.held.clear()
    world.target.plans.clear()
    gc.collect()
    assert gone() is None and state.verification is not None


@pytest.mark.parametrize("num_texts", [1, 4])
def test_a_step_is_no_longer_than_a_prefill(num_texts):
    """Red if the texts of one prefill batch are bounded each and not together, or by
    the longest pass alone where prefills are shorter."""
    world = World(free=40_000, size=40_000, step_rows=250)
    reqs = [
        world.add(TEXT * 30, verify=True, suffix_len=12, ends=range(6, 181, 6))
        for _ in range(num_texts)
    ]
    world.prefill()
    while len(world.released) < num_texts:
        assert world.step() == 1
    assert all(len(req.records[0].scores) == 30 for req in reqs)
    rows = [plan.num_verify_tokens for plan in world.plans]
    assert max(rows) <= 250 and sum(rows) > 250 * num_texts


def test_texts_take_turns():
    """Red if the first text that waits is judged to its end before the second."""
    world = World(free=40_000, size=40_000, step_rows=30)
    first, second = (world.add(verify=True, suffix_len=20) for _ in range(2))
    world.prefill()
    world.step()
    for _ in range(8):
        a, b = (r.state.verification for r in (first, second))
        if a is None or b is None:
            break
        assert abs(a.num_passes - b.num_passes) <= 1
        world.step()
    assert (
        len(world.released)
        + sum(r.state.verification is not None for r in (first, second))
        == 2
    )
