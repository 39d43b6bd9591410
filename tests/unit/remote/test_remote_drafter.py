"""The remote drafter in rounds of the engine, with streams that the test fills."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sglang_parse.drafting.drafter import Prefill, PrefillRequest
from sglang_parse.drafting.extension import ExtensionDrafter
from sglang_parse.options.server import ParseConfig
from sglang_parse.remote.remote_drafter import (
    FIRST_TOKENS,
    MAX_USELESS,
    RemoteDrafter,
)
from sglang_parse.remote.remote_streams import Stream
from sglang_parse.remote.streamed_answer import (
    COSTLY,
    ENOUGH,
    FIRST_PAUSE_S,
    MAX_BEHIND,
    PLENTY,
    StreamedAnswer,
)
from sglang_parse.sgl.ranks import Ranks
from tests.support.fake_engine import (
    STOP,
    TEXTS,
    VOCAB,
    FakeServer,
    FakeTarget,
    make_request,
)

MARK = 30  # a token that stands for no text


class Pieces:
    """A letter a token; tokens from MARK on are markers."""

    special = frozenset(range(MARK, VOCAB))
    ids: dict[bytes, int] = {}

    def __getitem__(self, token: int) -> bytes:
        return b"<mark>" if token in self.special else TEXTS[token].encode()

    def join(self, tokens) -> bytes:
        return b"".join(map(self.__getitem__, tokens))


class Encoder:
    """Each letter is a word; `<mark>` in a text becomes the marker."""

    pieces = Pieces()

    def encode(self, text: str):
        ids, k = [], 0
        while k < len(text):
            if text.startswith("<mark>", k):
                ids.append(MARK)
                k += 6
                continue
            ids.append(TEXTS.index(text[k]))
            k += 1
        return ids, list(range(len(ids)))


class Streams:
    """Streams that `write` fills at once: (prompt) -> (text, done, ended)."""

    def __init__(self, write) -> None:
        self.write = write
        self.is_up = True
        self.begun: list[Stream] = []
        self.ended: list[Stream] = []

    def begin(self, prompt: str, max_tokens: int) -> Stream | None:
        if not self.is_up:
            return None
        stream = Stream(prompt, max_tokens)
        text, stream.is_done, stream.has_ended = self.write(prompt)
        stream.text += text
        stream.has_failed = stream.is_done and not text
        self.begun.append(stream)
        return stream

    def end(self, stream: Stream) -> None:
        self.ended.append(stream)

    def look_up(self) -> None: ...


def serving(drafter: RemoteDrafter) -> ExtensionDrafter:
    """The drafter as a server has it."""

    def fail(error) -> None:
        raise error

    one = ExtensionDrafter(drafter, VOCAB, fail)
    one.open(None)
    return one


PROMPT = (10, 11, 2)
ANSWER = [*(4 + (k * 5 + k * k // 7) % 24 for k in range(90)), STOP]


def own(before):
    n = len(before) - len(PROMPT)
    return ANSWER[n] if n < len(ANSWER) else STOP


def asked(mode="exact", output=(ANSWER[0],), **more):
    req = make_request(mode, prompt=PROMPT, output=output, **more)
    req.input_embeds, req.finished = None, lambda: False
    return req


def text_of(tokens) -> str:
    return Pieces().join(tokens).decode()


def good(prompt):
    """A server that writes the target's own answer, a few letters at a time."""
    whole = text_of(PROMPT) + text_of(ANSWER[:-1])
    assert whole.startswith(prompt)
    rest = whole[len(prompt) :]
    return rest[:20].encode(), True, len(rest) <= 20


NUM = len(ANSWER)


def run(write, *, mode="exact", num=NUM, rounds=400, **settings):
    settings = {"segmenter": "line", "adaptive": False} | settings
    config = ParseConfig(**settings)
    now = [0.0]
    streams = Streams(write)
    ranks = Ranks(SimpleNamespace(world_size=1))
    drafter = RemoteDrafter(streams, Encoder(), ranks, lambda: now[0])
    target = FakeTarget(own, lambda before: 0.9)
    server = FakeServer(target, [serving(drafter)], config=config)
    req = asked(mode, config=config)
    while len(req.output_ids) < num and rounds:
        server.round(req)
        now[0] += 0.02
        rounds -= 1
    return SimpleNamespace(
        req=req, streams=streams, drafter=drafter, target=target, server=server
    )


def wrong(prompt):
    return b"zzzzzzzzzzzz", True, True


def nothing(prompt):
    return b"", True, True


def silent(prompt):
    return b"", False, False


def marks(prompt):
    return b"<mark><mark>" * 50, False, False


def broken(prompt):
    return b"\xff\xfe\xc3", False, False


def huge(prompt):
    return b"y" * 16_384, True, False


@pytest.mark.parametrize("write", [wrong, nothing, silent, marks, broken, huge])
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_bad_server_costs_no_token(write, adaptive):
    """Red if an answer ends early, waits, or holds what the target did not write."""
    done = run(write, adaptive=adaptive)
    assert done.req.output_ids == ANSWER
    if write in (marks, broken, silent, nothing):
        assert done.req.state.report.drafters.drafted == {}
        assert done.target.num_passes == 0  # the target's ordinary steps


@pytest.mark.parametrize("mode", ["exact", "semantic"])
def test_a_wrong_server_costs_hardly_any_time(mode):
    """Red if passes over wrong text go on, where each row of a pass costs half of what
    a plain round does: after its first trials no more is lost. The clock is virtual."""
    config = ParseConfig(segmenter="fixed:8")
    now = SimpleNamespace(s=0.0)
    streams = Streams(lambda prompt: (b"z" * 300, True, False))
    ranks = Ranks(SimpleNamespace(world_size=1))
    drafter = RemoteDrafter(streams, Encoder(), ranks, lambda: now.s)
    target = FakeTarget(lambda before: 4 + len(before) ** 3 // 5 % 24, lambda _: 0.1)

    def verify(round, plan):
        now.s += 0.01 + 0.005 * plan.num_verify_tokens
        return FakeTarget.verify(target, round, plan)

    def decode(round, go_on):
        now.s += 0.01
        return FakeTarget.decode(target, round, go_on)

    target.verify, target.decode = verify, decode
    server = FakeServer(target, [serving(drafter)], config=config)
    server.engine.clock = lambda: now.s
    req = asked(mode, (4,), config=config)
    while len(req.output_ids) < 2700:
        server.round(req)
    assert streams.begun and now.s < 1.15 * 0.01 * len(req.output_ids)


def test_a_server_is_asked_for_more_as_it_proves_right():
    """Red if a server that never helped is asked for as much as a good one, whose
    streams would be begun too often."""
    sizes = [stream.max_tokens for stream in run(good).streams.begun]
    assert sizes[0] == FIRST_TOKENS and max(sizes) > FIRST_TOKENS
    assert max(s.max_tokens for s in run(huge).streams.begun) == FIRST_TOKENS


def test_streams_that_give_nothing_are_begun_ever_more_rarely():
    """Red if a wrong server is asked anew in every round."""
    done = run(wrong)
    assert len(done.streams.begun) < 12
    assert len(done.streams.ended) >= len(done.streams.begun) - 1


def served(done, num):
    """Further requests, one after the other, and how many streams they began."""
    before = len(done.streams.begun)
    for _ in range(num):
        req = asked()
        while len(req.output_ids) < 80:
            done.server.round(req)
        assert req.output_ids == ANSWER[: len(req.output_ids)]
        req.finished = lambda: True
    return len(done.streams.begun) - before


def test_a_server_of_no_use_is_asked_rarely(caplog):
    """Red if each new request reads what a server sends that never helps, or a server
    that has come to its senses is not asked again."""
    done = run(huge, num=1)
    now = [0.0]
    done.drafter._worth._clock = lambda: now[0]
    assert served(done, 3 * MAX_USELESS) < MAX_USELESS + 3
    assert caplog.text.count("of no use") == 1
    now[0] += 60
    assert served(done, 1) == 1
    done.streams.write = good
    served(done, 1)
    now[0] += 60
    assert served(done, 2) >= 2 and not done.drafter._worth.is_failing


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("a" * ENOUGH + "b", "a" * ENOUGH + "c", True),
        ("abx", "abc", None),  # reading it cost little
        ("abx" * COSTLY, "abc", False),
        ("a" * ENOUGH + "b" * COSTLY, "a" * ENOUGH + "c", False),
        ("a" * PLENTY + "b" * 99 * PLENTY, "a" * PLENTY + "c", True),
        ("ab", "abc", None),  # the answer was short
        ("", "abc", None),
        ("", "a" * (MAX_BEHIND + 1), None),  # a busy server is late, and costs little
    ],
)
def test_a_stream_is_worth_what_it_had_right(text, answer, expected):
    """Red if short answers, or a server that was away, count against it."""
    memory = StreamedAnswer(None, "", text=bytearray(b"before" + answer.encode()))
    memory.start = 6
    stream = Stream("", 9, text=bytearray(text.encode()))
    assert memory.is_useful(stream) is expected
    stream.has_failed = True
    assert memory.is_useful(stream) is (expected if text else None)


def test_a_stream_that_is_outrun_is_begun_anew_where_the_answer_is():
    """Red if the target waits for a slow server, or the server for ever writes what
    stands already."""

    def slow(prompt):
        return text_of(ANSWER)[len(prompt) - len(PROMPT) :][:1].encode(), False, False

    done = run(slow)
    assert done.req.output_ids == ANSWER
    prompts = [len(s.prompt) for s in done.streams.begun]
    assert prompts == sorted(prompts) and len(prompts) >= 2
    assert prompts[1] - prompts[0] > MAX_BEHIND


def test_rounds_are_plain_while_a_stream_says_nothing():
    """Red if a server that takes seconds a token holds up decode steps in a row, or
    what it says at last is not taken."""
    now, streams = [0.0], Streams(lambda prompt: (b"", False, False))
    ranks = Ranks(SimpleNamespace(world_size=1))
    drafter = RemoteDrafter(streams, Encoder(), ranks, lambda: now[0])
    config = ParseConfig(segmenter="line", adaptive=False)
    server = FakeServer(
        FakeTarget(own, lambda _: 0.9), [serving(drafter)], config=config
    )
    req = asked(config=config)

    def gives() -> bool:
        server.round(req)
        r = SimpleNamespace(req=req, state=SimpleNamespace(failed_drafters=()))
        return drafter.can_draft(r)

    assert gives()  # it has just begun
    now[0] += 1.0
    assert not gives() and not gives()
    (stream,) = streams.begun
    stream.text += text_of(ANSWER)[len(stream.prompt) - len(PROMPT) :].encode()
    num = len(req.output_ids)
    assert gives() and len(req.output_ids) == num + 1
    server.round(req)
    assert len(req.output_ids) > num + 2
    assert req.output_ids == ANSWER[: len(req.output_ids)]


def test_unreachable_is_said_in_the_report():
    """Red if a request that got no draft does not say why, or one that did says so."""
    done = run(nothing)
    assert done.req.state.report.fallback == "draft_unreachable"
    streams = done.streams
    streams.is_up = False
    req = asked()
    done.server.round(req)
    assert req.state.report.fallback == "draft_unreachable"
    streams.is_up, streams.write = True, good
    for _ in range(9):
        done.drafter._clock = lambda: 1e6
        done.server.round(req)
    assert req.state.report.fallback == ""
    assert req.state.report.drafters.kept["remote"]


def test_a_prompt_is_sent_ahead_and_a_finished_request_is_let_go():
    """Red if the server first reads the prompt when the target is through with it, or
    streams of requests that are gone go on."""
    done = run(good, rounds=0)
    drafter, streams = done.drafter, done.streams
    req = asked(output=())
    off = asked("off", ())
    batch = [PrefillRequest(r, r.state, 0, 0, 3) for r in (req, off)]
    drafter.before_prefill(Prefill(None, batch))
    assert [s.prompt for s in streams.begun] == [text_of(PROMPT)]
    streams.begun[0].is_done = False
    req.finished = lambda: True
    drafter.before_prefill(Prefill(None, []))
    assert streams.ended == streams.begun and drafter.answers == {}
    assert FIRST_PAUSE_S < 1


@pytest.mark.parametrize(("mode", "num"), [("off", 1), ("exact", len(ANSWER) - 1)])
def test_a_request_that_gets_no_draft_has_no_stream(mode, num):
    """Red if a server reads the text of a request that is not drafted for, or of one
    whose answer has just ended."""
    done = run(good, rounds=0)
    req = asked(mode, tuple(ANSWER[:num]))
    done.server.round(req)
    assert len(req.output_ids) == num + 1 and done.streams.begun == []


def test_other_ranks_take_what_the_first_read():
    """Red if a rank without streams drafts otherwise than the first."""
    told = []

    class Told(Ranks):
        """Hands the first rank's lists to the other."""

        def agree(self, value):
            return self.agree_all([[value]])[0][0]

        def agree_all(self, lists):
            if self._group.rank_in_group == 0:
                told.append([tuple(one) for one in lists])
                return told[-1]
            found = told.pop(0)
            assert [len(one) for one in found] == [len(one) for one in lists]
            return found

    drafts = []
    for rank in (0, 1):
        ranks = Told(SimpleNamespace(world_size=2, rank_in_group=rank))
        streams = Streams(good) if ranks.is_first else None
        drafter = RemoteDrafter(streams, Encoder(), ranks, lambda: 1.0)
        req = asked()
        target = FakeTarget(own, lambda before: 0.9)
        server = FakeServer(target, [serving(drafter)])
        server.round(req)
        drafts.append(server.round(req).requests[0].draft)
    assert drafts[0] == drafts[1] and drafts[0].num_by("remote") == 20 - 1 + 1 - 1


def test_what_a_server_refuses_of_one_request_is_not_sent_again():
    """Red if a text that is refused is sent again and again."""
    answer = StreamedAnswer(None, "")
    answer.settle(Stream("", 9, is_done=True, has_failed=True, is_refused=True), 2.0)
    assert answer.not_before == math.inf and answer.has_failed
