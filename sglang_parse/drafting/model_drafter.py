"""The draft model as a drafter: what it writes, and which tokens have its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from sglang_parse.drafting.draft_model import (
    CAPTURED_CATCH_UP,
    DraftModel,
    DraftRequest,
)
from sglang_parse.drafting.drafter import Drafter, DrafterResources, Prefill, room_for
from sglang_parse.drafting.kv_flags import KvFlags
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.upload import upload


@dataclass
class ModelMemory:
    """What the draft model knows of one request."""

    #: Leading positions that have its KV, None until looked up in the flags.
    num_cached: int | None = None
    #: Positions that it forwarded in this round, 0 if it did not run.
    num_forwarded: int = 0


@dataclass(frozen=True)
class FirstStep:
    """The first draft step of the next round, which the device computes before it."""

    #: By row, what PARSE remembers of the request; another one if it begins anew.
    states: tuple[ref[RequestState], ...]
    #: By row, how many tokens the text has, all of which it has read.
    lens: tuple[int, ...]
    #: [rows, vocab], behind the last one.
    logits: Tensor

    def logits_of(
        self, states: Sequence[RequestState], orders: Sequence[DraftRequest]
    ) -> Tensor | None:
        """[orders, vocab], None unless it is the first step of every one."""
        row_of = {id(state()): row for row, state in enumerate(self.states)}
        rows = []
        for state, order in zip(states, orders, strict=True):
            row = row_of.get(id(state))
            if row is None or self.lens[row] != len(order.tokens):
                return None
            rows.append(row)
        if rows == list(range(len(self.states))):
            return self.logits
        return self.logits[upload(rows, self.logits.device)]


class ModelDrafter(Drafter):
    """The model of `--speculative-draft-model-path`. Its drafts are judged."""

    name = "model"
    token_level = False

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._memory: WeakKeyDictionary[RequestState, ModelMemory] = WeakKeyDictionary()
        self.runs_ahead = False
        #: What runs of the next round already, None where nothing does.
        self._first: FirstStep | None = None
        #: Whether it wrote in the last round.
        self._wrote = False

    @property
    def runners(self) -> Sequence[DraftRunner]:
        return (self.model,)

    def open(self, resources: DrafterResources) -> None:
        self.slots = resources.slots
        self.flags = KvFlags(resources.num_slots, self.slots.table.device)
        self.slots.tell(self.flags.forget)
        self.runs_ahead = resources.runs_ahead

    def can_draft(self, r: RequestRound) -> bool:
        return self.name not in r.state.failed_drafters

    def before_prefill(self, prefill: Prefill) -> None:
        """It catches up with a prompt when it first drafts behind it."""
        self.flags.forget(prefill.batch.out_cache_loc)

    def draft(self, round: Round) -> None:
        chosen, orders = [], []
        for i, r in enumerate(round):
            order = self._order(i, r)
            if order is not None:
                chosen.append(r)
                orders.append(order)
        if not orders:
            return
        first, states = self._first, [r.state for r in chosen]
        proposal = self.model.propose(
            orders,
            table=self.slots.table,
            sampling_info=round.batch.sampling_info,
            logits=first.logits_of(states, orders) if first else None,
        )
        round.num_read += proposal.num_read
        for k, r in enumerate(chosen):
            self._of(r).num_forwarded = proposal.num_forwarded[k]
            if not (proposal.tokens[k] or proposal.ended[k]):
                continue
            r.draft = r.draft.extended(
                self.name,
                proposal.tokens[k],
                ended=proposal.ended[k],
                token_level=False,
            )

    def _order(self, index: int, r: RequestRound) -> DraftRequest | None:
        """What it is to write for the request at `index` of the batch."""
        memory = self._of(r)
        memory.num_forwarded = 0
        num_new = room_for(r, self.name)
        if not num_new:
            return None
        tokens = [*r.tokens, *r.draft.tokens]
        if memory.num_cached is None:
            memory.num_cached = self.flags.num_leading(
                self.slots.table[r.row, : r.seq_len]
            )
        return DraftRequest(
            row=r.row,
            tokens=tokens,
            num_cached=min(memory.num_cached, len(tokens) - 1),
            num_new=num_new,
            stop_ids=r.state.stop_ids,
            batch_index=index,
            grammar=r.grammar,
        )

    def after_pass(self, round: Round) -> None:
        """Note which of the decided tokens have its KV, and begin the next draft."""
        writers = [r for r in round if self._of(r).num_forwarded]
        spans = []
        for r in round:
            memory = self._of(r)
            first = cached = r.seq_len
            if memory.num_cached is not None:
                if memory.num_forwarded:
                    # It has caught up; else what it lacks is long, and known.
                    first = min(memory.num_cached, r.seq_len)
                cached = max(memory.num_cached, memory.num_forwarded)
                if not r.decision.pending:
                    # Where the output left the draft, its KV is of other tokens.
                    cached = min(cached, r.new_len)
                memory.num_cached = cached
            memory.num_forwarded = 0
            valid_end = min(max(cached, first), r.new_len)
            spans.append((r.row, first, valid_end, r.new_len))
        self.flags.mark(self.slots.table, spans)
        # A round with drafts behind one without may be a trial.
        begins = self.runs_ahead and self._wrote
        self._first = self._step_ahead(writers) if begins and writers else None
        self._wrote = bool(writers)

    def _step_ahead(self, requests: Sequence[RequestRound]) -> FirstStep | None:
        """Forward the last tokens of each text that is read nearly to its end."""
        states, rows, tails, lens = [], [], [], []
        for r in requests:
            text = (*r.decision.accept_tokens, *r.decision.pending)
            end = r.seq_len + 1 + len(text)
            num_left = max(1, end - (self._of(r).num_cached or 0))
            if num_left <= min(len(text), CAPTURED_CATCH_UP) and (
                end <= r.req.kv.kv_allocated_len
            ):
                states.append(ref(r.state))
                rows.append(r.row)
                tails.append(text[-num_left:])
                lens.append(end)
        if not rows:
            return None
        logits = self.model.read_tails(rows, tails, lens, self.slots.table)
        return FirstStep(tuple(states), tuple(lens), logits)

    def _of(self, r: RequestRound) -> ModelMemory:
        return self._memory.setdefault(r.state, ModelMemory())
