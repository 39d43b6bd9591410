"""A draft with its own tokenizer: what it reads and keeps, what the target gets."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from sglang_parse.drafting.draft_model import DraftProposal
from sglang_parse.drafting.draft_prompt import PROMPT_KEY
from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder
from sglang_parse.drafting.text_drafter import TextDrafter
from sglang_parse.judging.decide import Decision
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round
from sglang_parse.requests.state import RequestState
from tests.support import tokenizer_kinds as tokenizers
from tests.support.own_rows import CheckedRows

END = "<|im_end|>"


@pytest.fixture(scope="module")
def target() -> TextEncoder:
    return TextEncoder(tokenizers.embedded())


@pytest.fixture(scope="module")
def other() -> TextEncoder:
    return TextEncoder(tokenizers.byte_level())


class ScriptedModel:
    """Writes on in its own tokens as `plan` says, and checks the KV that it is given.

    plan: the text so far -> what it would write, END for the end of the response.
    """

    def __init__(self, encoder: TextEncoder, plan, *, num_slots: int = 3000) -> None:
        self.encoder = encoder
        self.plan = plan
        self.writer = DraftWriter(encoder)
        self.rows = CheckedRows(num_slots)
        self.stop_ids = frozenset(encoder.pieces.special)
        self.num_read: list[int] = []
        self.reach = 1 << 30

    def propose(self, requests, *, table, sampling_info, phase) -> DraftProposal:
        tokens, ended, forwarded = [], [], []
        for r in requests:
            ids = list(r.tokens)
            assert 0 <= r.num_cached < len(ids)
            self.rows.check(r.row, r.num_cached, ids)
            self.num_read.append(len(ids) - r.num_cached)
            plan = self.plan(self.encoder.pieces.join(ids))
            written, end, _ = plan.partition(END.encode())
            new = self.writer.write(written, most=10**6, whole=True)
            stops = bool(end) and len(new) < r.num_new
            new = new[: r.num_new]
            last = len(ids) + r.num_new - 1  # which is not forwarded
            self.rows.write(r.row, r.num_cached, (ids + new)[r.num_cached : last])
            tokens.append(tuple(new))
            ended.append(stops)
            forwarded.append(min(len(ids) + len(new), len(ids) + r.num_new - 1))
        complete = (True,) * len(tokens)
        return DraftProposal(tuple(tokens), tuple(ended), complete, tuple(forwarded))


def make_state(stops=()) -> RequestState:
    return RequestState(None, frozenset(stops), None, report=None)


def make_req(prompt, output=(), custom=None) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom),
        session=None,
        origin_input_ids=list(prompt),
        output_ids=list(output),
        input_embeds=None,
        finished=lambda: False,
    )


def record(req, state, *, window: int = 16, grammar=None) -> RequestRound:
    r = RequestRound(req, state, 1, 0, req.output_ids[-1], len(req.output_ids))
    r.draft = Draft(state.pending[:window])
    r.window, r.budgets, r.grammar = window, {"model": window}, grammar
    return r


def run(drafter: TextDrafter, *records: RequestRound) -> None:
    batch = SimpleNamespace(sampling_info=None)
    drafter.draft(Round(batch, list(records)))


def follower(answer: str):
    """A draft that writes the answer on from where the text stands in it."""
    whole = answer.encode()

    def plan(text: bytes) -> bytes:
        at = whole.find(text[-24:])
        return whole[at + len(text[-24:]) :] if at >= 0 else whole

    return plan


ANSWER = (
    "Step 1: Tom had 12 and finds 4, so now 16.\nStep 2: the quick naïve fox 好的 👍🏽 "
    "jumps over 345 lazy dogs, isn't it?\n\nAnswer: 16"
)
PROMPT = "Tom has 12 coins. Day 1: finds 4. How many coins does Tom have now?\n"


def test_a_right_draft_is_read_once(target, other):
    """Red if what the draft wrote itself is encoded or read again, or text is lost
    between two rounds."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END))
    drafter = TextDrafter(model, target, other)
    prompt = target.encode(PROMPT)[0]
    answer = target.encode(ANSWER)[0]
    req, state = make_req(prompt, answer[:1]), make_state({2})
    while not (r := record(req, state)).draft.ended:
        run(drafter, r)
        written = drafter.pieces.join([*req.output_ids, *r.draft.tokens])
        assert ANSWER.encode().startswith(written)
        if r.draft.ended:
            assert written == ANSWER.encode()
            break
        assert r.draft.tokens and len(r.draft.tokens) <= 16
        num = len(req.output_ids) + len(r.draft.tokens)
        rest = ANSWER.encode()[len(written) :]
        own = drafter.writer.write(rest, most=1, whole=True)
        req.output_ids += [*r.draft.tokens, *own]
        assert num < 200
    # The prompt, and then a token or two where the target's own token cut a word.
    assert model.num_read[0] > 10 and sum(model.num_read[1:]) < 60
    assert drafter.pieces.join(req.output_ids + list(r.draft.tokens)) == ANSWER.encode()


def test_drafts_follow_whatever_the_target_decides(target, other):
    """Red if a round with pending tokens, an error of the draft, a cut in a character
    or tokens decided ahead puts the draft behind the wrong text: the model checks its
    KV each time, and what it writes goes on from the text."""
    rng = random.Random(11)
    for trial in range(60):
        own = other if trial % 2 else TextEncoder(tokenizers.sentencepiece())
        model = ScriptedModel(
            own, lambda _: (ANSWER[rng.randrange(40) :] + END).encode()
        )
        drafter = TextDrafter(model, target, own)
        req = make_req(target.encode(PROMPT)[0], [rng.randrange(3, 500)])
        state = make_state({2})
        for _ in range(12):
            r = record(req, state, window=rng.randint(1, 30))
            run(drafter, r)
            memory = drafter.memories[state]
            tokens = list(r.draft.tokens)
            held = len(state.pending[: r.window])
            assert len(tokens) <= r.window and not set(tokens) & {0, 1, 2}
            known = drafter.pieces.join(
                [*req.origin_input_ids, *req.output_ids, *state.ready, *tokens]
            )
            assert bytes(memory.transcript.text).startswith(known)
            if r.draft.ended and len(tokens) > held:
                assert bytes(memory.transcript.text) == known
            # The target keeps some, leaves some pending, and writes a token itself.
            kept = rng.randint(0, len(tokens))
            decided = [*state.ready, *tokens[:kept], rng.randrange(3, 560)]
            state.ready = ()
            if rng.random() < 0.3 and len(decided) > 1:
                state.ready = tuple(decided[-1:])
                decided = decided[:-1]
            req.output_ids += decided
            state.draft = Draft(tuple(tokens[kept:]) if rng.random() < 0.3 else ())
            if state.pending:
                req.output_ids[-1:] = []
                req.output_ids or req.output_ids.append(5)
                state.ready = ()
                break
        drafter._close(list(drafter.memories.values()))
        model.rows.check_whole()


def test_a_chat_is_read_in_the_drafts_own_template(target, other):
    """Red if the draft goes on from the target's template where it has one of its own,
    or what follows is put behind another text."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END))
    drafter = TextDrafter(model, target, other)
    answer = target.encode(ANSWER)[0]
    custom = {PROMPT_KEY: "Own words: " + PROMPT}
    req = make_req(target.encode("Other words")[0], answer[:4], custom)
    state = make_state({2})
    for _ in range(2):
        r = record(req, state)
        run(drafter, r)
        text = bytes(drafter.memories[state].transcript.text)
        assert text.startswith(f"Own words: {PROMPT}".encode())
        assert f"Own words: {PROMPT}{ANSWER}".encode().startswith(text)
        assert len(r.draft.tokens) > 8
        req.output_ids += list(r.draft.tokens)


def test_pending_tokens_are_part_of_the_text(target, other):
    """Red if the draft writes again what already waits for its boundary."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END))
    drafter = TextDrafter(model, target, other)
    answer = target.encode(ANSWER)[0]
    state = make_state({2})
    req = make_req(target.encode(PROMPT)[0], answer[:3])
    first = record(req, state)
    run(drafter, first)
    state.draft = Draft(first.draft.tokens)
    second = record(req, state, window=30)
    run(drafter, second)
    assert second.draft.tokens[: len(state.pending)] == state.pending
    assert len(second.draft.tokens) > len(state.pending)
    assert second.draft.num_by("model") == len(second.draft.tokens) - len(state.pending)
    text = drafter.pieces.join([*req.output_ids, *second.draft.tokens])
    assert ANSWER.encode().startswith(text)


def test_a_window_that_is_full_asks_nobody(target, other):
    """Red if a held-back text is written twice, or a request without budget drafts."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END))
    drafter = TextDrafter(model, target, other)
    req = make_req(target.encode(PROMPT)[0], target.encode(ANSWER)[0][:1])
    state = make_state({2})
    r = record(req, state)
    run(drafter, r)
    tokens = r.draft.tokens
    calls = len(model.num_read)
    # The same round again, with a smaller window: the text is there already.
    again = record(req, state, window=5)
    run(drafter, again)
    assert len(model.num_read) == calls and again.draft.tokens == tokens[:5]
    idle = record(req, state)
    idle.budgets = {}
    run(drafter, idle)
    assert not idle.draft.tokens


def test_stop_tokens_and_grammars_cut_the_draft(target, other):
    """Red if a token that ends the request, or one that its grammar refuses, is part
    of a draft."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END))
    drafter = TextDrafter(model, target, other)
    answer = target.encode(ANSWER)[0]
    r = record(make_req(target.encode(PROMPT)[0], answer[:1]), make_state({answer[6]}))
    run(drafter, r)
    assert r.draft.ended and list(r.draft.tokens) == answer[1:6]
    grammar = SimpleNamespace(is_dead=False, walk=lambda tokens: min(2, len(tokens)))
    r = record(
        make_req(target.encode(PROMPT)[0], answer[:1]), make_state({2}), grammar=grammar
    )
    run(drafter, r)
    assert not r.draft.ended and list(r.draft.tokens) == answer[1:3]
    # A response that nothing may end goes on, and so no draft says that it ended.
    r = record(make_req(target.encode(PROMPT)[0], answer[:-2]), make_state())
    run(drafter, r)
    assert not r.draft.ended


def test_rows_of_requests_that_left_are_given_back(target, other):
    """Red if ended, aborted or retracted requests keep the draft's KV: soon nobody is
    drafted for."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END), num_slots=400)
    drafter = TextDrafter(model, target, other)
    prompt, answer = target.encode(PROMPT)[0], target.encode(ANSWER)[0]
    reads = []
    for _ in range(20):
        req, state = make_req(prompt, answer[:1]), make_state({2})
        r = record(req, state)
        run(drafter, r)
        assert r.draft.tokens
        reads.append(model.num_read[-1])
        req.finished = lambda: True
    # The prompt of the first is there for the others.
    assert reads[0] > 30 and max(reads[1:]) < 15
    req, state = make_req(prompt, answer[:1]), make_state({2})
    run(drafter, record(req, state))
    assert set(drafter.memories) == {state}
    prefill = SimpleNamespace(requests=[SimpleNamespace(req=req, state=None)])
    drafter.before_prefill(prefill)
    assert not drafter.memories and not model.rows.rows
    model.rows.check_whole()


def test_requests_aborted_in_the_queue_leave_their_rows(target, other):
    """Red if a request that is retracted and then aborted, of which SGLang never says
    that it has finished, keeps its row: soon nobody is drafted for. Or if one loses its
    row that is drafted for in this round."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END))
    drafter = TextDrafter(model, target, other)
    prompt, answer = target.encode(PROMPT)[0], target.encode(ANSWER)[0]
    num_rows = len(model.rows.pool.free_slots)
    goes_on, state = make_req(prompt, answer[:1]), make_state({2})
    for _ in range(3 * num_rows):
        old, new = (
            record(goes_on, state),
            record(make_req(prompt, answer[:1]), make_state({2})),
        )
        run(drafter, old, new)
        assert old.draft.tokens and new.draft.tokens
        assert state in drafter.memories
    assert len(drafter.memories) <= num_rows
    drafter._close(list(drafter.memories.values()))
    model.rows.check_whole()


def test_a_pool_that_is_too_small_costs_drafts_alone(target, other):
    """Red if a request that finds no slots for its draft stops the round."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END), num_slots=100)
    drafter = TextDrafter(model, target, other)
    answer = target.encode(ANSWER)[0]
    records = [
        record(make_req(target.encode(f"{i} {PROMPT}")[0], answer[:1]), make_state({2}))
        for i in range(3)
    ]
    run(drafter, *records)
    drafted = [bool(r.draft.tokens) for r in records]
    assert True in drafted and False in drafted
    for r in records:
        r.kept = Kept(decision=Decision((answer[1],), 0, 0, ()))
    model.rows.check_whole()


def test_a_flush_forgets_the_drafts_kv(target, other):
    """Red if drafts after new weights, or after the pools' memory was released, are
    written on KV of before."""
    model = ScriptedModel(other, follower(PROMPT + ANSWER + END), num_slots=400)
    drafter = TextDrafter(model, target, other)
    prompt, answer = target.encode(PROMPT)[0], target.encode(ANSWER)[0]
    reads = []
    for _ in range(2):
        req, state = make_req(prompt, answer[:1]), make_state({2})
        r = record(req, state)
        run(drafter, r)
        assert r.draft.tokens
        reads.append(model.num_read[-1])
        drafter.flush()
        model.rows.check_whole()
    assert reads[0] == reads[1] > 30
    assert not drafter.memories and not model.rows.rows
