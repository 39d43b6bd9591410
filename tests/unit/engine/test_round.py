"""Whole rounds with a fake target and fake drafters, in milliseconds.

The draft of most tests is three lines of two letters; the target's own continuation is
the same letters but where a test says otherwise.
"""

import logging
import random
from itertools import chain

import pytest

from sglang_parse.engine.round import QUANTUM_S
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.result import emit
from sglang_parse.requests.client_text import ClientText
from sglang_parse.requests.draft import Draft
from tests.support.fake_engine import (
    LINE,
    STOP,
    FakeDrafter,
    FakeServer,
    FakeSlots,
    FakeTarget,
    make_request,
)

DRAFT = (20, 21, LINE, 22, 23, LINE, 24, 25, LINE)
OTHER = 30
START = (10, 11, 12)


def follows(text):
    """A target that writes START and then `text`, and OTHER behind anything else."""

    def own(tokens):
        whole = (*START, *text)
        at = len(tokens)
        return whole[at] if tokens == whole[:at] and at < len(whole) else OTHER

    return own


def says(*wrong):
    """A judge that finds a prefix wrong if it contains one of these tokens."""
    return lambda tokens: 0.1 if any(t in wrong for t in tokens) else 0.9


def serve(draft=DRAFT, own=None, judge=None, **more):
    """A server whose draft model writes `draft` behind START."""
    target = FakeTarget(own or (lambda tokens: OTHER), judge or says())
    model = FakeDrafter(lambda tokens: (*START, *draft)[len(tokens) :])
    return FakeServer(target, [model], **more), target, model


def test_all_segments_are_kept_in_one_pass():
    """Red if a draft that passes every verdict is not kept whole, with the target's
    token behind it."""
    server, target, model = serve()
    req = make_request()
    (r,) = server.round(req)
    assert req.output_ids == [12, *DRAFT, OTHER]
    assert r.boundaries == (3, 6, 9) and target.num_passes == 1
    assert model.seen == [(*DRAFT, OTHER)]
    assert req.state.recovering == 0


@pytest.mark.parametrize(("wrong", "kept"), [(20, 0), (22, 3), (25, 6)])
def test_cut_at_the_first_middle_and_last_boundary(wrong, kept):
    """Red if more or less than the segments before the failing one is kept."""
    server, *_ = serve(judge=says(wrong))
    req = make_request(exact_tail=False)
    (r,) = server.round(req)
    assert req.output_ids == [12, *DRAFT[:kept], OTHER]
    assert r.decision.num_judged == kept
    assert req.state.recovering == 1


def test_target_writes_the_rejected_segment_over_several_rounds():
    """Red if verdicts count again before the target has finished the segment, or never
    count again."""
    text = (20, 21, LINE, 31, 32, LINE, 24, 25, LINE)
    own = follows(text)
    judged = []

    def judge(tokens):
        judged.append(len(tokens))
        return 0.1 if 22 in tokens else 0.9

    # The draft model errs in the second line, each time that it is asked there.
    def write(tokens):
        at = len(tokens) - len(START)
        return (22, 23, LINE, 24, 25, LINE)[max(0, at - 3) :] if at >= 3 else DRAFT

    target = FakeTarget(own, judge)
    server = FakeServer(target, [FakeDrafter(write)])
    req = make_request()
    server.round(req)
    assert req.output_ids == [12, 20, 21, LINE, 31] and req.state.recovering == 1
    judged.clear()
    while req.state.recovering:
        before = len(req.output_ids)
        server.round(req)
        assert len(req.output_ids) > before
    written = tuple(req.output_ids[1:])
    assert written[:6] == text[:6]
    assert all(n > len(START) + 6 for n in judged)
    server.round(req)
    assert tuple(req.output_ids[1:])[: len(text)] == text


def test_exact_mode_gives_the_targets_own_tokens():
    """Red if exact mode keeps a token that the target would not have written, or asks
    for a verdict."""
    text = (20, 21, LINE, 31, 32, 33, STOP)
    server, target, _ = serve(own=follows(text))
    req = make_request("exact")
    while STOP not in req.output_ids:
        server.round(req)
    assert tuple(req.output_ids[1:]) == text
    assert all(plan.num_suffix_tokens == 0 for plan in target.plans)


def test_plain_round_is_one_decode_step():
    """Red if a request in mode `off` takes a pass, or gets more than one token."""
    server, target, model = serve(own=follows(DRAFT))
    req = make_request("off")
    server.round(req)
    server.round(req)
    assert req.output_ids == [12, *DRAFT[:2]]
    assert (target.num_passes, target.num_decodes, model.num_asked) == (0, 2, 0)


def test_plain_round_of_several_steps(monkeypatch):
    """Red if several steps of the target give other tokens than one at a time, go on
    behind the end of an answer, lack KV rows, or count as one pass."""
    server, target, _ = serve(own=follows((*DRAFT[:5], STOP)))
    monkeypatch.setattr(server.engine.planner, "_plain_steps", lambda round, paused: 4)
    one, other = make_request("off"), make_request("off", output=(12, *DRAFT[:3]))
    round = server.round(one, other)
    assert one.output_ids == [12, *DRAFT[:4]]
    assert other.output_ids == [12, *DRAFT[:5], STOP]
    assert [r.kept.places for r in round] == [(0, 2, 4, 6), (1, 3, 5)]
    assert (target.num_passes, target.num_decodes) == (0, 4)
    assert [r.state.report.counters.target_passes for r in round] == [4, 3]
    assert server.slots.extended[-1] == [2 + 4, 5 + 4]


@pytest.mark.parametrize(("has_other", "num"), [(False, 3), (True, 4)])
def test_plain_steps_end_where_answers_end(monkeypatch, has_other, num):
    """Red if steps are taken for nobody, or if one end of two ends a round at once."""
    server, target, _ = serve(own=follows((*DRAFT[:5], STOP)))
    monkeypatch.setattr(server.engine.planner, "_plain_steps", lambda round, paused: 8)
    monkeypatch.setattr(server.engine.planner, "observe", lambda round: None)
    ends = make_request("off", output=(12, *DRAFT[:3]))
    round = server.round(ends, *[make_request("off")] * has_other)
    assert ends.output_ids == [12, *DRAFT[:5], STOP]
    assert target.num_decodes == round.num_steps == num


def two_texts(texts, *, wrong=0):
    """What comes next in the text that the second token of a prompt names; each token
    at a multiple of `wrong` is another one."""

    def next_token(tokens):
        text, at = texts[tokens[1]], len(tokens) - 3
        if wrong and at % wrong == wrong - 1 and at < len(text) - 1:
            return OTHER
        return text[at] if at < len(text) else STOP

    return next_token


def ahead(next_token, tokens):
    """The next 30 tokens."""
    text = tuple(tokens)
    for _ in range(30):
        text += (next_token(text),)
    return text[len(tokens) :]


def ticking(step=1e-4):
    """A clock, and what moves it on."""
    now = [0.0]

    def clock():
        now[0] += step
        return now[0]

    def spend(seconds):
        now[0] += seconds

    return clock, spend


def slow(spend, seconds, step):
    """`step`, which takes time."""

    def run(*args):
        spend(seconds)
        return step(*args)

    return run


def test_who_drafts_takes_no_part_in_the_pass():
    """Red if a request waits in a pass for a draft that is not complete, if the draft
    is lost or begun anew after a quantum, or its slots are freed."""
    target = FakeTarget(follows(DRAFT), says())
    model = FakeDrafter(lambda t: (*START, *DRAFT)[len(t) :], steps=lambda: 4)
    server = FakeServer(target, [model])
    one, off = make_request(), make_request("off")
    for k in (1, 2):
        done = server.round(one, off)
        assert [r.req for r in done] == [off] and target.num_passes == 0
        assert one.output_ids == [12] and off.output_ids == [12, *DRAFT[:k]]
        assert one.state.pending == DRAFT[: 4 * k]
        assert one.state.draft.parts == (("model", 4 * k),)
        assert one.kv.kv_allocated_len >= 3 + 4 * k
    done = server.round(one, off)
    assert [r.req for r in done] == [one, off] and target.num_passes == 1
    assert one.output_ids == [12, *DRAFT, OTHER] and one.state.pending == ()
    assert one.state.report.counters.draft_tokens == len(DRAFT)
    assert off.output_ids == [12, *DRAFT[:3]]


@pytest.mark.parametrize(("num_enough", "joins"), [(4, True), (5, False)])
def test_a_draft_that_is_long_enough_joins_a_pass_of_others(
    monkeypatch, num_enough, joins
):
    """Red if a draft waits though it is long enough, or its first part is judged before
    that; or if it joins a pass of nobody."""
    texts = [list(DRAFT), [20, 21, LINE]]
    own = two_texts(texts)
    model = FakeDrafter(lambda t: texts[t[1]][len(t) - 3 :], steps=lambda: 4)
    server = FakeServer(FakeTarget(own, says()), [model])
    plan = server.engine.planner.plan

    def planned(round):
        plan(round)
        for r in round:
            r.num_enough = num_enough

    monkeypatch.setattr(server.engine.planner, "plan", planned)
    long, short = (make_request(prompt=(10, k)) for k in range(2))
    assert server.round(long).requests == [] and long.state.pending == DRAFT[:4]
    long.state.draft = Draft()
    done = server.round(long, short)
    assert [r.req for r in done] == [long] * joins + [short]
    assert short.output_ids == [12, 20, 21, LINE, STOP]
    assert long.output_ids == ([12, *DRAFT[:4]] if joins else [12])
    assert long.state.pending == (() if joins else DRAFT[:4])


def test_a_drafter_that_raises_in_a_later_phase_leaves_nobody_drafting():
    """Red if a request waits for ever for a drafter that is not asked any more, or what
    the drafter wrote in the phases before is lost."""
    phases = iter([DRAFT, DRAFT])
    errors = []
    target = FakeTarget(follows(DRAFT), says())
    model = FakeDrafter(lambda t: next(phases), steps=lambda: 4)
    server = FakeServer(target, [model], on_error=errors.append)
    one, other = make_request("exact"), make_request("exact")
    assert server.round(one, other).requests == []
    done = server.round(one, other)
    assert errors == ["model"] and not any(r.is_drafting for r in done)
    for req in (one, other):
        assert req.output_ids == [12, *DRAFT[:5]] and req.state.pending == ()
    server.round(one, other)
    assert one.output_ids == [12, *DRAFT[:6]] and errors == ["model"]


def quantum_server(own, *, steps=None, **more):
    """One that adapts, whose draft model writes what the target would."""
    clock, spend = ticking()
    model = FakeDrafter(lambda tokens: ahead(own, tokens), steps=steps)
    target = FakeTarget(own, says(OTHER))
    config = ParseConfig(segmenter="line")
    server = FakeServer(target, [model], config=config, clock=clock, **more)
    return server, target, model, spend


@pytest.mark.parametrize(
    ("more", "num"),
    [
        ({"has_mail": lambda: True}, 1),
        ({"num_waiting": 1}, 1),
        ({"may_repeat": False}, 1),
        ({}, 3),
    ],
    ids=["mail", "somebody waits", "a grammar", "0.1 s"],
)
def test_a_quantum_ends_where_the_scheduler_is_needed(more, num):
    """Red if somebody who came waits for more than a round, or a stream for longer than
    it may; or if each pass asks the scheduler."""
    own = two_texts([[20, 21, LINE] * 400])
    server, target, _, spend = quantum_server(own)
    target.verify = slow(spend, 0.4 * QUANTUM_S, target.verify)
    req = make_request("exact", prompt=(10, 0))
    assert len(server.quantum(req, **more)) == num
    assert len(req.output_ids) > num


def test_a_quantum_lasts_until_somebody_is_given_a_token():
    """Red if the scheduler is asked though draft phases alone took the time; or if mail
    does not end a quantum without a pass, or costs the draft."""
    own = two_texts([[20, 21, LINE] * 400])
    server, target, model, spend = quantum_server(own, steps=lambda: 1)
    model.draft = slow(spend, 2 * QUANTUM_S, model.draft)
    req = make_request("exact", prompt=(10, 0))
    mail = iter([False, False, True])
    assert server.quantum(req, has_mail=lambda: next(mail)) == []
    assert req.output_ids == [12] and len(req.state.pending) == 3
    (done,) = server.quantum(req)
    assert target.num_passes == 1 and model.num_phases > 4
    assert req.output_ids[1:] == [*done.requests[0].draft.tokens, own(written(done))]


def written(done):
    """The tokens before the last one that the first request of a pass was given."""
    r = done.requests[0]
    return (*r.req.origin_input_ids, *r.req.output_ids[:-1])


@pytest.mark.parametrize("end", ["stop", "length", "stop string"])
def test_a_quantum_ends_with_an_answer(end):
    """Red if an answer is written on in the passes after the one that ends it, or
    nobody looks for its stop string."""
    text = [20, 21, LINE] * (4 if end == "stop" else 400)
    own = two_texts([[20, 21, LINE] * 400, text])
    server, *_ = quantum_server(own)
    other = make_request("exact", prompt=(10, 0))
    most = 14 if end == "length" else 1000
    ends = make_request("exact", prompt=(10, 1), max_new_tokens=most)
    if end == "stop string":
        ends.sampling_params.stop_strs = ["x"]
    rounds = server.quantum(other, ends)
    gave = [r.decision.accept_tokens for one in rounds for r in one if r.req is ends]
    if end == "stop string":
        assert len(gave) == 1
    else:
        assert sum(map(len, gave[:-1])) < 13 <= sum(map(len, gave))
    assert rounds[-1].requests[-1].req is ends
    given = [r.decision.accept_tokens for r in rounds[-1] if r.req is ends]
    assert given and given[0]


def test_tokens_of_several_passes_are_emitted_once_and_in_order():
    """Red if a request loses tokens of one pass of a quantum, or gets them twice."""
    own = two_texts([[20, 21, LINE, 22] * 400, [23, 24, LINE] * 400])
    server, target, _, spend = quantum_server(own, steps=lambda: 5)
    target.verify = slow(spend, 0.3 * QUANTUM_S, target.verify)
    reqs = [make_request("exact", prompt=(10, k)) for k in range(2)]
    for _ in range(3):
        rounds = server.engine.run_quantum(
            lambda: server.open_round(*reqs, may_repeat=True)
        )
        for req in reqs:
            records = [r for one in rounds for r in one if r.req is req]
            assert len(records) > 1
            gave = [r.decision.accept_tokens for r in records]
            one = emit(records)
            assert one.tokens == tuple(chain(*gave)) and req.state.ready == ()
            assert sum(one.passes) == len(one.tokens)
            req.output_ids += one.tokens
    for req in reqs:
        tokens = (*req.origin_input_ids, *req.output_ids)
        assert all(own(tokens[:k]) == tokens[k] for k in range(3, len(tokens)))


@pytest.mark.parametrize("mode", ["exact", "semantic"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_answers_do_not_depend_on_when_drafts_are_verified(mode, adaptive):
    """Red if a pass begins elsewhere than behind the last one, if anybody is given a
    token that the target would not write there, is written on behind an answer's end,
    or loses what is drafted or recovers; for any schedule of phases."""
    rng = random.Random(int(adaptive))
    num_passes = num_left_out = 0
    for _ in range(40):
        texts = [[rng.randrange(20, 28) for _ in range(60)] for _ in range(4)]
        for text in texts:
            text[3::4] = [LINE] * len(text[3::4])
            text[rng.randrange(5, 60) :] = [STOP]
        own, draft = two_texts(texts), two_texts(texts, wrong=rng.randrange(2, 12))
        clock, spend = ticking()
        model = FakeDrafter(
            lambda tokens, draft=draft: ahead(draft, tokens),
            steps=lambda: rng.randrange(1, 9),
        )
        target = FakeTarget(own, says(OTHER))
        target.verify = slow(spend, rng.choice((0.0, 0.02, 0.06)), target.verify)
        config = ParseConfig(segmenter="line", adaptive=adaptive)
        server = FakeServer(target, [model], config=config, clock=clock)
        reqs = [
            make_request(mode, prompt=(10, k), window=rng.randrange(1, 40))
            for k in range(4)
        ]
        going = list(reqs[: rng.randrange(1, 5)])
        coming = [r for r in reqs if r not in going]
        at = {id(req): 2 for req in reqs}
        while going:
            rounds = server.quantum(*going, has_mail=lambda: rng.random() < 0.2)
            num_passes += len(rounds)
            for one in rounds:
                num_left_out += len(going) - len(one)
                for r in one:
                    assert r.seq_len == at[id(r.req)]
                    at[id(r.req)] = r.new_len
            for req in going:
                num = len(req.origin_input_ids) + len(req.output_ids)
                assert at[id(req)] == num - 1
                # What is drafted has its slots.
                pending = len(req.state.pending)
                assert req.kv.kv_allocated_len >= num - 1 + pending + bool(pending)
            going = [r for r in going if STOP not in r.output_ids]
            if coming:
                going.append(coming.pop())
        for req, text in zip(reqs, texts, strict=True):
            answer = req.output_ids[: req.output_ids.index(STOP)]
            assert answer == [12, *text[: text.index(STOP)]]
            assert req.output_ids[len(answer) :] == [STOP]
    assert num_passes > 100 and num_left_out > 20


def test_a_clients_text_is_judged_without_a_drafter():
    """Red if the rest of a client's text is not the draft, or is counted as drafted."""
    target = FakeTarget(follows(DRAFT), says(24))
    server = FakeServer(target, [])
    req = make_request(client=ClientText([12, *DRAFT]), exact_tail=False)
    (r,) = server.round(req)
    assert req.output_ids == [12, *DRAFT[:6], 24]
    assert r.draft.num_client == len(DRAFT) and r.draft.num_new == 0
    counters = req.state.report.counters
    assert counters.kept_client_tokens == 6 and counters.draft_tokens == 0


@pytest.mark.parametrize("num", [0, 1, 2, 4, 9, 40])
@pytest.mark.parametrize("has_client", [True, False])
def test_an_exact_head_is_the_targets_own(num, has_client):
    """Red if one of the first tokens comes from a draft that the judge approves of and
    the target did not write, or if verdicts count no more behind them."""
    rng = random.Random(num)
    for _ in range(30):
        own = [rng.choice((20, 21, LINE)) for _ in range(60)]
        draft = [t if rng.random() < 0.7 else rng.choice((22, LINE)) for t in own]
        target = FakeTarget(follows(own), lambda tokens: 0.99)
        model = FakeDrafter(lambda tokens, draft=draft: draft[len(tokens) - 3 :][:9])
        config = ParseConfig(
            segmenter="line", adaptive=False, exact_head=num, window=rng.choice((5, 9))
        )
        server = FakeServer(target, [model], config=config)
        client = ClientText([12, *draft[:30]]) if has_client else None
        req = make_request(config=config, client=client)
        while len(req.output_ids) < 50:
            server.round(req)
        head = max(0, num - 1)  # behind the first token
        assert req.output_ids[1:][:head] == own[:head]
        kept = req.state.report.counters.judged_tokens
        assert kept > 0 or num == 40


def test_a_stop_inside_a_kept_segment_takes_its_tail_back():
    """Red if tokens behind a stop that SGLang finds later are counted as kept."""
    server, *_ = serve()
    req = make_request()
    server.round(req)
    req.state.report.finish(req.output_ids[:5])  # a stop string ends at token 21
    counters = req.state.report.counters
    assert counters.kept_tokens == 4
    assert counters.written_tokens == 1  # the first token, which prefill sampled
    assert counters.kept_segments == 3  # verdicts stay counted


def test_a_drafter_that_raises_is_left_out(caplog):
    """Red if its request loses a token, the other drafter's draft, or the log fills."""

    def fail(tokens):
        raise RuntimeError("broken")

    errors = []
    target = FakeTarget(follows(DRAFT), says())
    bad = FakeDrafter(fail, name="bad")
    good = FakeDrafter(lambda tokens: (*START, *DRAFT)[len(tokens) :])
    server = FakeServer(target, [bad, good], on_error=errors.append)
    with caplog.at_level(logging.ERROR):
        first, second = make_request(), make_request()
        server.round(first)
        server.round(second)
        server.round(first)
    assert first.output_ids[: len(DRAFT) + 1] == [12, *DRAFT]
    assert second.output_ids == [12, *DRAFT, OTHER]
    # Asked once for each request, in its first round alone.
    assert errors == ["bad", "bad"]
    assert sum("drafter bad failed" in m for m in caplog.messages) == 1


def test_a_plain_round_is_timed_without_who_reads_behind_it():
    """Red if a head is weighed against rounds that are slow because of it."""
    server, _, model = serve()
    now = [0.0]
    server.engine.clock = lambda: now[0]
    model.after_pass = lambda round: now.__setitem__(0, now[0] + 7.0)
    round = server.round(make_request("off"))
    assert round.seconds == {"draft": 0.0, "plain": 0.0, "follow": 7.0}


def test_token_level_drafts_stand_only_where_the_target_agrees():
    """Red if what an EAGLE-3 head writes is kept by a verdict alone."""
    target = FakeTarget(follows((20, 21, 31)), says())
    head = FakeDrafter(lambda tokens: DRAFT, name="eagle3", token_level=True)
    server = FakeServer(target, [head])
    req = make_request("exact")
    (r,) = server.round(req)
    assert req.output_ids == [12, 20, 21, 31]
    assert r.draft.num_by("eagle3") == 4 and r.draft.num_token_level == 4


def test_unjudged_rest_of_a_draft_waits_for_the_next_round():
    """Red if tokens behind the last boundary are thrown away or judged twice."""
    server, target, model = serve(draft=(*DRAFT[:3], 22, 23), own=follows(DRAFT))
    req = make_request()
    (r,) = server.round(req)
    assert r.shown == DRAFT[:3]
    assert req.output_ids == [12, *DRAFT[:3], 22]
    assert req.state.pending == (23,)


def test_what_there_is_no_room_to_judge_is_followed_token_by_token():
    """Red if a draft without a verdict is kept, or the pass has too many rows."""
    slots = FakeSlots(max_rows=14)  # 10 rows of the draft, one suffix of three
    config = ParseConfig(segmenter="line", adaptive=False)
    server, target, _ = serve(own=follows(DRAFT), slots=slots, config=config)
    req = make_request()
    while len(req.output_ids) < 1 + len(DRAFT):
        server.round(req)
    assert tuple(req.output_ids[1:10]) == DRAFT
    assert all(plan.num_verify_tokens <= slots.max_rows for plan in target.plans)


def test_kv_rows_cover_what_is_pending():
    """Red if the slots of pending tokens are freed, or spare ones are kept."""
    server, *_ = serve(draft=(*DRAFT[:3], 22, 23), own=follows(DRAFT))
    req = make_request()
    (r,) = server.round(req)
    assert req.kv.kv_allocated_len == r.new_len + 1 + len(req.state.pending)
