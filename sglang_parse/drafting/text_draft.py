"""A draft model with a tokenizer of its own, as a drafter of text.

It reads each request as text in its own tokens, with KV rows of its own. What it writes
reaches the target as text too, in the target's tokens.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sglang_parse.drafting.base import DrafterContext, DrafterResources, Prefill
from sglang_parse.drafting.draft_loop import DraftRequest
from sglang_parse.drafting.draft_prompt import PROMPT_KEY, carried
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder
from sglang_parse.drafting.text_model import TextModel
from sglang_parse.drafting.thinking import Thinking, encoders_of, marks_of
from sglang_parse.drafting.transcript import LOOKBACK, Transcript
from sglang_parse.requests.round import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.runtime.own_rows import Row
from sglang_parse.runtime.protocols import SchedulerRequest
from sglang_parse.runtime.tokenizers import agreement_of, load_tokenizer

logger = logging.getLogger(__name__)

# Tokens that the estimate of their lengths begins with, on each side.
TRUST = 256
MAX_RATE = 4.0


@dataclass
class Memory:
    """What it knows of one request."""

    req: SchedulerRequest
    transcript: Transcript
    #: Bytes of the prompt, and of all that is decided.
    num_prompt: int
    num_bytes: int
    #: Output tokens that are among these bytes.
    num_output: int = 0
    #: Whether the response ends where the transcript does, as the draft sees it.
    ended: bool = False
    #: Its KV, None before it drafts.
    row: Row | None = None


@dataclass
class Order:
    """A request that is to be drafted for."""

    r: RequestRound
    memory: Memory
    #: Target tokens that it may write.
    room: int
    #: Offset into the transcript's text from where on it writes.
    start: int


class TextDrafter:
    """The model of `--speculative-draft-model-path`, where its tokenizer is not the
    target's. Its drafts are judged."""

    name = "model"
    token_level = False
    max_tokens = 0
    elsewhere = False
    reads_features = False

    def __init__(
        self,
        model: TextModel,
        target: TextEncoder,
        draft: TextEncoder,
        thinking: Thinking | None = None,
    ) -> None:
        """target, draft: of the two tokenizers."""
        self.model = model
        self.pieces = target.pieces
        self.writer = DraftWriter(target)
        self.encoder = draft
        self.thinking = thinking or Thinking(None, None)
        self.memories: dict[RequestState, Memory] = {}
        #: (tokens, bytes) that were seen lately, of the draft and of the target.
        self._lengths = [[TRUST, 4 * TRUST], [TRUST, 4 * TRUST]]

    @classmethod
    def create(cls, context: DrafterContext) -> TextDrafter | None:
        """None where the server has no draft model, or one with the target's ids."""
        server_args = context.server_args
        if not server_args.speculative_draft_model_path:
            return None
        agreement = agreement_of(server_args)
        if agreement.shares_ids:
            return None
        logger.info("PARSE: the draft model drafts in text; %s", agreement)
        tokenizer = load_tokenizer(server_args, of_draft=True)
        model = TextModel(
            server_args,
            context.gpu_id,
            context.nccl_port,
            context.context_len,
            tokenizer=tokenizer,
        )
        return cls(
            model,
            *encoders_of(context.tokenizer, tokenizer),
            Thinking(marks_of(context.tokenizer), marks_of(tokenizer)),
        )

    @property
    def runners(self) -> Sequence[DraftRunner]:
        return (self.model,)

    def open(self, resources: DrafterResources) -> None:
        return None

    def can_draft(self, r: RequestRound) -> bool:
        return self.name not in r.state.failed_drafters and r.req.input_embeds is None

    def before_prefill(self, prefill: Prefill) -> None:
        """A request that is computed anew has another state from now on."""
        fresh = {id(one.req) for one in prefill.requests}
        self._close(m for m in self.memories.values() if id(m.req) in fresh)
        self._sweep()

    def after_prefill(
        self, prefill: Prefill, features: Tensor | None, next_tokens: Tensor
    ) -> None:
        return None

    def after_pass(self, round: Round) -> None:
        return None

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
        )
        round.num_read += proposal.num_read
        for k, order in enumerate(orders):
            self._take(
                order.memory,
                proposal.tokens[k],
                ended=proposal.ended[k],
                num_forwarded=proposal.num_forwarded[k],
            )
            self._hand_over(order)

    def _order(self, r: RequestRound) -> Order | None:
        """What may be written for a request, its transcript brought up to date."""
        # Where a grammar cut what was pending, nothing is drafted in its place.
        held = min(len(r.state.pending), r.window)
        room = r.window - max(held, len(r.draft.tokens))
        if not r.budgets.get(self.name) or room <= 0 or r.draft.ended:
            return None
        if r.grammar is not None and r.grammar.is_dead:
            return None
        memory = self.memories.get(r.state) or self._remember(r)
        output, ready = r.req.output_ids, r.state.ready
        new = [*output[memory.num_output :], *ready]
        if memory.num_output > len(output):
            new = [*ready[memory.num_output - len(output) :]]
        decided, pending = self.pieces.join(new), self.pieces.join(r.draft.tokens)
        if not memory.transcript.follow(memory.num_bytes, decided + pending):
            memory.ended = False
        memory.num_output += len(new)
        memory.num_bytes += len(decided)
        return Order(r, memory, room, memory.num_bytes + len(pending))

    def _remember(self, r: RequestRound) -> Memory:
        ids = r.req.origin_input_ids
        prompt = self.pieces.join(ids)
        if own := carried(r.req, PROMPT_KEY):
            state = self.thinking.state(self.pieces, ids)
            prompt = self.thinking.fit(own, state).encode(errors="replace")
        transcript = Transcript(self.encoder)
        transcript.follow(0, prompt)
        memory = Memory(r.req, transcript, len(prompt), len(prompt))
        self.memories[r.state] = memory
        return memory

    def _num_new(self, order: Order) -> int:
        """Tokens of its own that the model is to write, 0 where enough is written."""
        if order.memory.ended:
            return 0
        left = order.room - len(self._written(order))
        if left <= 0:
            return 0
        ids = order.memory.transcript.ids
        (own, own_bytes), (target, target_bytes) = self._lengths
        rate = min(MAX_RATE, max(1 / MAX_RATE, own / own_bytes * target_bytes / target))
        # The last word is held back, so there is one more than is handed over.
        num_new = math.ceil(left * rate) + 1
        return max(0, min(num_new, self.model.rows.width - len(ids))) if ids else 0

    def _request(
        self, index: int, order: Order, num_new: int, busy: set[Row]
    ) -> DraftRequest | None:
        """Its work order for the request at `index` of the batch; None without room."""
        memory, rows = order.memory, self.model.rows
        ids = memory.transcript.ids
        if memory.row is None:
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
            # What those have that take no part in this round can be had.
            self._close(m for m in self.memories.values() if m.row not in busy)
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

    def _take(
        self, memory: Memory, tokens: Sequence[int], *, ended: bool, num_forwarded: int
    ) -> None:
        """The model has written these tokens behind the transcript."""
        transcript, row = memory.transcript, memory.row
        assert row is not None
        before = len(transcript.text)
        num = transcript.append(tokens)
        memory.ended = ended and num == len(tokens)
        row.num_cached = min(num_forwarded, len(transcript.ids))
        transcript.num_kept = len(transcript.ids)
        self._count(0, num, len(transcript.text) - before)
        if not row.num_shared:
            settled = bisect_right(transcript.ends, memory.num_prompt) - LOOKBACK
            if 0 < settled <= row.num_cached:
                self.model.rows.share(row, transcript.ids[:settled])

    def _written(self, order: Order) -> list[int]:
        text = bytes(order.memory.transcript.text[order.start :])
        return self.writer.write(text, most=order.room, whole=order.memory.ended)

    def _hand_over(self, order: Order) -> None:
        """Extend the draft by what stands in the transcript."""
        r, memory = order.r, order.memory
        tokens = self._written(order)
        written = self.pieces.join(tokens)
        self._count(1, len(tokens), len(written))
        is_all = len(written) == len(memory.transcript.text) - order.start
        stop_ids = r.state.stop_ids
        ended = memory.ended and is_all and bool(stop_ids)
        stop = next((k for k, t in enumerate(tokens) if t in stop_ids), None)
        if stop is not None:
            tokens, ended = tokens[:stop], True
        if r.grammar is not None:
            allowed = r.grammar.walk(tokens)
            tokens, ended = tokens[:allowed], ended and allowed == len(tokens)
        if tokens or ended:
            r.draft = r.draft.extended(
                self.name, tokens, ended=ended, token_level=False
            )

    def _count(self, side: int, num_tokens: int, num_bytes: int) -> None:
        """Learn how many bytes a token has. side: 0 the draft, 1 the target."""
        seen = self._lengths[side]
        if num_tokens and num_bytes:
            seen[0] += num_tokens
            seen[1] += num_bytes
        if seen[0] > 64 * TRUST:
            seen[0], seen[1] = seen[0] // 2, seen[1] // 2

    # -- Requests that are gone ---------------------------------------------------

    def _sweep(self) -> None:
        """Ranks do it at the same calls, so that they have the same rows free."""
        self._close(m for m in self.memories.values() if m.req.finished())

    def _close(self, memories: Iterable[Memory]) -> None:
        closed = {id(memory) for memory in memories}
        for state, memory in list(self.memories.items()):
            if id(memory) in closed:
                del self.memories[state]
                transcript, row = memory.transcript, memory.row
                if row is not None:
                    self.model.rows.keep(row, transcript.num_kept)
                    self.model.rows.close(row, transcript.ids)
