"""A draft model with a tokenizer of its own, as a drafter of text.

It reads each request as text in its own tokens, with KV rows of its own. Its text
reaches the target in the target's tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_parse.drafting.draft_model import DraftProposal
from sglang_parse.drafting.draft_prompt import carried_prompt
from sglang_parse.drafting.drafter import (
    Drafter,
    DrafterContext,
    Prefill,
    can_reach,
    extend_draft,
    room_for,
)
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder
from sglang_parse.drafting.text_model import TextModel
from sglang_parse.drafting.thinking import ThinkingMarks, marks_of, thinking_state
from sglang_parse.drafting.transcript import LOOKBACK, Transcript
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.own_rows import Row
from sglang_parse.sgl.scheduler_types import SchedulerRequest
from sglang_parse.sgl.tokenizers import load_tokenizer

# Tokens that the first estimate of a token's length counts for.
TRUST = 256
# Most tokens of the draft for one of the target, and the reverse.
MAX_RATE = 4.0


@dataclass
class DraftedText:
    """What it knows of one request."""

    req: SchedulerRequest
    transcript: Transcript
    #: Bytes of the prompt, and of all decided tokens.
    num_prompt: int
    num_bytes: int
    #: Output tokens that are among these bytes.
    num_output: int = 0
    #: Whether the response ends where the transcript does, as the draft sees it.
    ended: bool = False
    #: Its KV, None before it drafts.
    row: Row | None = None


class Order(NamedTuple):
    """A request that may be drafted for."""

    r: RequestRound
    memory: DraftedText
    #: Target tokens that it may write.
    room: int
    #: Offset into the transcript's text at which its draft begins.
    start: int


class TokenLength:
    """Mean length of a token of late."""

    def __init__(self) -> None:
        self._tokens, self._bytes = TRUST, 4 * TRUST

    @property
    def mean(self) -> float:
        """In bytes."""
        return self._bytes / self._tokens

    def add(self, num_tokens: int, num_bytes: int) -> None:
        if num_tokens and num_bytes:
            self._tokens += num_tokens
            self._bytes += num_bytes
        if self._tokens > 64 * TRUST:
            self._tokens, self._bytes = self._tokens // 2, self._bytes // 2


class TextDrafter(Drafter):
    """The model of `--speculative-draft-model-path`, where its tokenizer is not the
    target's. Its drafts are judged."""

    name = "model"
    token_level = False

    def __init__(
        self,
        model: TextModel,
        target: TextEncoder,
        draft: TextEncoder,
        marks: tuple[ThinkingMarks | None, ThinkingMarks | None] = (None, None),
    ) -> None:
        """target, draft, marks: of the two tokenizers."""
        self.model = model
        self.pieces = target.pieces
        self.writer = DraftWriter(target)
        self.encoder = draft
        self.marks = marks
        self.memories: dict[RequestState, DraftedText] = {}
        self._own_length, self._target_length = TokenLength(), TokenLength()

    @classmethod
    def create(cls, context: DrafterContext) -> TextDrafter:
        tokenizer = load_tokenizer(context.server_args, of_draft=True)
        model = TextModel(context, tokenizer)
        target = context.tokenizer
        marks = (marks_of(target), marks_of(tokenizer))
        return cls(model, TextEncoder(target), TextEncoder(tokenizer), marks)

    @property
    def runners(self) -> Sequence[DraftRunner]:
        return (self.model,)

    def can_draft(self, r: RequestRound) -> bool:
        if self.name in r.state.failed_drafters or r.req.input_embeds is not None:
            return False
        memory = self.memories.get(r.state)
        num_own = len(memory.transcript.ids) if memory else 0
        return can_reach(r.state, self.model, num_own)

    def before_prefill(self, prefill: Prefill) -> None:
        """A request that is computed anew has another state from now on."""
        fresh = {id(one.req) for one in prefill.requests}
        self._close(m for m in self.memories.values() if id(m.req) in fresh)
        self._sweep()

    # -- A round -----------------------------------------------------------------

    def draft(self, round: Round) -> None:
        self._sweep()
        orders, requests = [], []
        busy = {m.row for r in round if (m := self.memories.get(r.state)) and m.row}
        for i, r in enumerate(round):
            order = self._order(r)
            if order is None:
                continue
            num_new = self._num_new(order)
            request = self._request(i, order, num_new, busy) if num_new else None
            if request is None:
                self._hand_over(order)  # what an earlier round left over
                continue
            orders.append(order)
            requests.append(request)
        if not orders:
            return
        proposal = self.model.propose(
            requests,
            table=self.model.rows.table,
            sampling_info=round.batch.sampling_info,
            phase=DraftPhase.of(round, len(orders)),
        )
        round.num_read += proposal.num_read
        round.num_draft_steps += proposal.num_steps
        for k, order in enumerate(orders):
            self._take(order.memory, proposal, k)
            self._hand_over(order)
            # What a grammar has cut is not written again.
            goes_on = not (proposal.is_complete[k] or order.r.draft.ended)
            order.r.is_drafting = goes_on and order.r.grammar is None

    def _order(self, r: RequestRound) -> Order | None:
        """What may be written for a request, its transcript brought up to date."""
        room = room_for(r, self.name)
        if not room:
            return None
        memory = self.memories.get(r.state) or self._remember(r)
        output, ready = r.req.output_ids, r.state.ready
        new = [
            *output[memory.num_output :],
            *ready[max(0, memory.num_output - len(output)) :],
        ]
        decided, pending = self.pieces.join(new), self.pieces.join(r.draft.tokens)
        if not memory.transcript.follow(memory.num_bytes, decided + pending):
            memory.ended = False
        memory.num_output += len(new)
        memory.num_bytes += len(decided)
        return Order(r, memory, room, memory.num_bytes + len(pending))

    def _remember(self, r: RequestRound) -> DraftedText:
        ids = r.req.origin_input_ids
        prompt = self.pieces.join(ids)
        if own := carried_prompt(r.req):
            ours, theirs = self.marks
            if theirs is not None:
                own = theirs.fit(own, thinking_state(ours, self.pieces, ids))
            prompt = own.encode(errors="replace")
        transcript = Transcript(self.encoder)
        transcript.follow(0, prompt)
        memory = DraftedText(r.req, transcript, len(prompt), len(prompt))
        self.memories[r.state] = memory
        return memory

    def _num_new(self, order: Order) -> int:
        """Tokens of its own that the model is to write, 0 where enough is written."""
        ids = order.memory.transcript.ids
        if order.memory.ended or not ids:
            return 0
        left = order.room - len(self._written(order))
        if left <= 0:
            return 0
        rate = self._target_length.mean / self._own_length.mean
        # The last word is held back, so there is one more than is handed over.
        num_new = math.ceil(left * min(MAX_RATE, max(1 / MAX_RATE, rate))) + 1
        return max(0, min(num_new, self.model.rows.width - len(ids)))

    def _request(
        self, index: int, order: Order, num_new: int, busy: set[Row]
    ) -> DraftRequest | None:
        """Its work order for the request at `index` of the batch; None without room."""
        memory, rows = order.memory, self.model.rows
        ids = memory.transcript.ids
        if memory.row is None:
            memory.row = rows.open(ids)
            if memory.row is None:
                # SGLang says of no request in its queue that it was aborted.
                self._close_idle(busy)
                memory.row = rows.open(ids)
            if memory.row is None:
                return None
            busy.add(memory.row)
            memory.transcript.num_kept = len(ids)
        row = memory.row
        rows.keep(row, min(memory.transcript.num_kept, len(ids) - 1))
        memory.transcript.num_kept = len(ids)
        wanted = len(ids) + num_new
        if not rows.fit(row, wanted=wanted, busy=busy):
            self._close_idle(busy)
            if not rows.fit(row, wanted=wanted, busy=busy):
                return None
        return DraftRequest(
            row=row.index,
            tokens=ids,
            num_cached=row.num_cached,
            num_new=num_new,
            stop_ids=self.model.stop_ids,
            batch_index=index,
        )

    def _take(self, memory: DraftedText, proposal: DraftProposal, k: int) -> None:
        """The model has written the proposal's k-th tokens after the transcript."""
        transcript, row, tokens = memory.transcript, memory.row, proposal.tokens[k]
        assert row is not None
        before = len(transcript.text)
        num = transcript.append(tokens)
        memory.ended = proposal.ended[k] and num == len(tokens)
        row.num_cached = min(proposal.num_forwarded[k], len(transcript.ids))
        transcript.num_kept = len(transcript.ids)
        self._own_length.add(num, len(transcript.text) - before)
        if not row.num_shared:
            settled = bisect_right(transcript.ends, memory.num_prompt) - LOOKBACK
            if 0 < settled <= row.num_cached:
                self.model.rows.share(row, transcript.ids[:settled])

    def _written(self, order: Order) -> list[int]:
        """The target's tokens of what the transcript holds after the draft."""
        text = bytes(order.memory.transcript.text[order.start :])
        return self.writer.write(text, most=order.room, whole=order.memory.ended)

    def _hand_over(self, order: Order) -> None:
        """Extend the draft by what the transcript holds."""
        r, memory = order.r, order.memory
        tokens = self._written(order)
        num_bytes = len(self.pieces.join(tokens))
        self._target_length.add(len(tokens), num_bytes)
        is_all = num_bytes == len(memory.transcript.text) - order.start
        ended = memory.ended and is_all and bool(r.state.stop_ids)
        extend_draft(r, self, tokens, ended=ended)

    def flush(self) -> None:
        self._close(self.memories.values())
        self.model.rows.clear()

    # -- Requests that are gone ---------------------------------------------------

    def _sweep(self) -> None:
        """Ranks do it at the same calls, so that they have the same rows free."""
        self._close(m for m in self.memories.values() if m.req.finished())

    def _close_idle(self, busy: set[Row]) -> None:
        """Take what requests hold that have no part in this round."""
        held = [m for m in self.memories.values() if m.row is not None]
        self._close(m for m in held if m.row not in busy)

    def _close(self, memories: Iterable[DraftedText]) -> None:
        closed = {id(memory) for memory in memories}
        for state, memory in list(self.memories.items()):
            if id(memory) in closed:
                del self.memories[state]
                transcript, row = memory.transcript, memory.row
                if row is not None:
                    self.model.rows.keep(row, transcript.num_kept)
                    self.model.rows.close(row, transcript.ids)
