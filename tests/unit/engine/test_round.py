"""Whole rounds with a fake target and fake drafters, in milliseconds.

The draft of most tests is three lines of two letters; the target's own continuation is
the same letters but where a test says otherwise.
"""

import logging
import random
from itertools import pairwise

import pytest

from sglang_parse.options.server import ParseConfig
from sglang_parse.policy import in_a_row
from sglang_parse.requests.client_text import ClientText
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


def test_the_target_is_left_at_what_each_request_keeps():
    """Red if a recurrent state is left at the whole draft, or nobody brings it on
    behind a pass."""
    own = follows((*DRAFT[:4], 31, 32))
    server, target, _ = serve(judge=says(22), own=own)
    first, second = make_request(), make_request(exact_tail=False)
    server.round(first, second)
    assert len(first.output_ids) == 1 + 5 and len(second.output_ids) == 1 + 4
    assert target.kept == [[5, 4]]


@pytest.mark.parametrize(("wrong", "kept"), [(20, 0), (22, 3), (25, 6)])
def test_cut_at_the_first_middle_and_last_boundary(wrong, kept):
    """Red if more or less than the segments before the failing one is kept."""
    server, *_ = serve(judge=says(wrong))
    req = make_request(exact_tail=False)
    (r,) = server.round(req)
    assert req.output_ids == [12, *DRAFT[:kept], OTHER]
    assert r.decision.num_judged == kept
    assert req.state.recovering == 1


def test_longest_keeps_up_to_the_last_passing_verdict():
    """Red if the keep rule `longest` stops at the first failure."""
    server, *_ = serve(judge=lambda tokens: 0.1 if len(tokens) == 6 else 0.9)
    first, longest = make_request(), make_request(keep_rule="longest")
    server.round(first)
    server.round(longest)
    assert first.output_ids == [12, OTHER]
    assert longest.output_ids == [12, *DRAFT, OTHER]


def test_exact_tail_keeps_what_the_target_would_have_written():
    """Red if agreement behind the cut is lost, or goes on past a disagreement."""
    text = (*DRAFT[:4], 31, 32)
    server, *_ = serve(judge=says(22), own=follows(text))
    with_tail, without = make_request(), make_request(exact_tail=False)
    server.round(with_tail)
    server.round(without)
    assert with_tail.output_ids == [12, *DRAFT[:4], 31]
    assert without.output_ids == [12, *DRAFT[:3], 22]


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


@pytest.mark.parametrize(("looks_up", "num"), [(True, 2), (False, 8)])
def test_who_comes_waits_for_one_step(monkeypatch, looks_up, num):
    """Red if a new request waits for all steps of a plain round, if ranks look for it
    whose steps are short, or if a step is expected to run behind a round that ended."""
    server, target, _ = serve(own=follows(DRAFT))
    planner = server.engine.planner
    monkeypatch.setattr(planner, "_plain_steps", lambda round, paused: 8)
    monkeypatch.setattr(planner.gate.costs, "step_ms", lambda bs: 5.0 * looks_up)
    monkeypatch.setattr(planner.gate.costs, "knows_plain", lambda bs: True)
    mail = iter([False, True, True])
    round = server.open_round(make_request("off"), has_mail=lambda: next(mail, True))
    server.engine.run(round)
    assert target.num_decodes == round.num_steps == num
    assert round.goes_on is not looks_up


@pytest.mark.parametrize(
    ("output", "tokens_left", "goes_on"),
    [((), 40, True), ((12, *DRAFT[:3]), 40, False), ((), 4, False)],
    ids=["open", "a stop", "the longest length"],
)
def test_a_step_ahead_is_everybodys(monkeypatch, output, tokens_left, goes_on):
    """Red if a step runs ahead for an answer that ends in this round, or if it has no
    column for its KV."""
    server, target, _ = serve(own=follows((*DRAFT[:5], STOP)))
    monkeypatch.setattr(server.engine.planner, "_plain_steps", lambda round, paused: 4)
    monkeypatch.setattr(
        server.engine.planner.gate.costs, "knows_plain", lambda bs: True
    )
    asked, decode = [], target.decode

    def ask(round, go_on):
        steps = decode(round, go_on)
        asked.append(len(steps) == round.num_steps and go_on(steps[:-1], len(steps)))
        return steps

    monkeypatch.setattr(target, "decode", ask)
    one, other = make_request("off"), make_request("off", output=output)
    other.sampling_params.max_new_tokens = len(other.output_ids) + tokens_left
    assert server.round(one, other).goes_on
    assert asked == [goes_on]
    assert server.slots.extended[-1][0] == 2 + 4 + 1


def test_who_begins_beside_a_step_that_ran_ahead_gets_its_own_tokens(monkeypatch):
    """Red if a request gets the step before it came, which is others', or one less than
    its answer may have; or if its end is looked for a step too early."""
    server, target, _ = serve(own=follows((*DRAFT[:5], STOP)))
    monkeypatch.setattr(server.engine.planner, "_plain_steps", lambda round, paused: 4)
    monkeypatch.setattr(server.engine.planner, "observe", lambda round: None)
    decode = target.decode

    def skip_a_step(round):
        round.requests[1].num_skipped = 1

    def with_a_step_before(round, go_on):
        round.num_steps = 3
        behind = decode(round, lambda steps, num: go_on([[12, 9], *steps], num + 1))
        first = [round.requests[0].bonus_token + 100, 99]
        return [first, *behind]

    monkeypatch.setattr(target, "look_ahead", skip_a_step)
    monkeypatch.setattr(target, "decode", with_a_step_before)
    one, begins = make_request("off"), make_request("off")
    begins.sampling_params.max_new_tokens = len(begins.output_ids) + 3
    round = server.round(one, begins)
    assert begins.output_ids == [12, *DRAFT[:3]]
    assert [r.kept.places for r in round] == [(0, 2, 4, 6), (3, 5, 7)]
    assert len(one.output_ids) == 1 + 4


@pytest.mark.parametrize("mode", ["exact", "semantic"])
def test_rounds_in_a_row_give_what_single_rounds_give(monkeypatch, mode):
    """Red if a round in a row begins elsewhere than behind the last one, writes on
    behind an answer's end, or loses what is pending or recovers."""
    monkeypatch.setattr(in_a_row, "MOST_MS", 1e9)
    rng = random.Random(0)
    length = {"single": 0, "row": 0}
    for _ in range(30):
        texts = [[rng.randrange(20, 28) for _ in range(40)] for _ in range(2)]
        for text in texts:
            text[3::4] = [LINE] * len(text[3::4])
            text[rng.randrange(20, 40) :] = [STOP]
        answers = []
        for way in length:
            own, draft = two_texts(texts), two_texts(texts, wrong=rng.randrange(2, 9))
            model = FakeDrafter(lambda tokens, draft=draft: ahead(draft, tokens))
            config = ParseConfig(segmenter="line", adaptive=way == "row")
            target = FakeTarget(own, says(OTHER))
            server = FakeServer(target, [model], config=config)
            reqs = [
                make_request(mode, prompt=(10, k), output=(12,), max_new_tokens=200)
                for k in range(2)
            ]
            going = list(reqs)
            while going:
                rounds = server.row(*going)
                length[way] = max(length[way], len(rounds))
                for one, after in pairwise(rounds):
                    assert [r.new_len for r in one] == [r.seq_len for r in after]
                going = [r for r in going if STOP not in r.output_ids]
            answers.append([r.output_ids[: r.output_ids.index(STOP)] for r in reqs])
        assert answers[0] == answers[1]
    assert length["single"] == 1 < length["row"]


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


def test_a_row_ends_where_the_scheduler_is_asked(monkeypatch):
    """Red if somebody who came waits for more than a round, or a stream for longer than
    it may."""
    own = two_texts([[20, 21, LINE] * 400])
    config = ParseConfig(segmenter="line")
    for most_ms, came, num in ((1e9, True, 1), (0.0, False, 1), (1e9, False, 2)):
        monkeypatch.setattr(in_a_row, "MOST_MS", most_ms)
        model = FakeDrafter(lambda tokens: ahead(own, tokens))
        server = FakeServer(FakeTarget(own, says(OTHER)), [model], config=config)
        req = make_request("exact", prompt=(10, 0))
        asked = iter([came, True])
        assert len(server.row(req, has_mail=lambda asked=asked: next(asked))) == num


def test_the_schedulers_time_belongs_to_the_next_round():
    """Red if it is lost, or if a prefill in between counts as the scheduler's."""
    server, _, _ = serve()
    clock = iter(range(100))
    server.engine.clock = lambda: float(next(clock))
    first, second = server.round(make_request()), server.round(make_request())
    assert (first.between, second.between) == (0.0, 1.0)
    server.engine.interrupt()
    assert server.round(make_request()).between == 0.0


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


def test_modes_mix_in_one_batch():
    """Red if one request's mode changes what another one gets."""
    text = (20, 31, 32)
    alone = {}
    for mode in ("semantic", "exact", "off"):
        server, *_ = serve(own=follows(text), judge=says(22))
        req = make_request(mode)
        server.round(req)
        alone[mode] = req.output_ids
    server, target, _ = serve(own=follows(text), judge=says(22))
    reqs = {mode: make_request(mode) for mode in ("semantic", "exact", "off")}
    server.round(*reqs.values())
    assert {mode: req.output_ids for mode, req in reqs.items()} == alone
    assert alone == {
        "semantic": [12, *DRAFT[:3], OTHER],
        "exact": [12, 20, 31],
        "off": [12, 20],
    }
    assert target.num_passes == 1


def test_a_drafter_that_returns_nothing_costs_a_decode_step():
    """Red if an empty draft stops the round or takes a verify pass."""
    server, target, _ = serve(draft=())
    req = make_request()
    server.round(req)
    assert req.output_ids == [12, OTHER]
    assert (target.num_passes, target.num_decodes) == (0, 1)


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


def test_a_drafter_that_raises_after_the_pass_costs_no_token():
    """Red if what the target decided is lost because a drafter cannot follow it."""
    server, _, model = serve()
    model.after_pass = lambda round: 1 / 0
    req = make_request()
    server.round(req)
    assert req.output_ids == [12, *DRAFT, OTHER]
    assert req.state.failed_drafters == {"model"}


def test_a_plain_round_is_timed_without_who_reads_behind_it():
    """Red if a head is weighed against rounds that are slow because of it."""
    server, _, model = serve()
    now = [0.0]
    server.engine.clock = lambda: now[0]
    model.after_pass = lambda round: now.__setitem__(0, now[0] + 7.0)
    round = server.round(make_request("off"))
    assert round.seconds == {"draft": 0.0, "plain": 0.0, "follow": 7.0}


def test_a_stage_that_fails_for_one_request_ends_that_request(caplog, monkeypatch):
    """Red if an error in one request's record stops the others."""
    server, *_ = serve()
    bad, good = make_request(), make_request()
    recover = server.engine.segmenting.recover

    def broken(r):
        if r.req is bad:
            raise IndexError("no such boundary")
        recover(r)

    monkeypatch.setattr(server.engine.segmenting, "recover", broken)
    round = server.round(bad, good)
    assert isinstance(round.requests[0].error, IndexError)
    assert bad.output_ids == [12]
    assert good.output_ids == [12, *DRAFT, OTHER]
    assert any("request 'r' failed" in m for m in caplog.messages)


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
