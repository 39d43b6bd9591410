"""The draft model as a drafter: what it writes, and which tokens have its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from sglang_parse.drafting.draft_model import DraftModel
from sglang_parse.drafting.drafter import (
    Drafter,
    DrafterResources,
    Prefill,
    can_reach,
    room_for,
)
from sglang_parse.drafting.kv_flags import KvFlags
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState


@dataclass
class ModelMemory:
    """What the draft model knows of one request."""

    #: Leading positions that have its KV.
    num_cached: int
    #: Leading positions whose flags say so.
    num_flagged: int


class ModelDrafter(Drafter):
    """The model of `--speculative-draft-model-path`. Its drafts are judged."""

    name = "model"
    token_level = False

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._memory: WeakKeyDictionary[RequestState, ModelMemory] = WeakKeyDictionary()

    @property
    def runners(self) -> Sequence[DraftRunner]:
        return (self.model,)

    def open(self, resources: DrafterResources) -> None:
        self.slots = resources.slots
        self.flags = KvFlags(resources.num_slots, self.slots.table.device)
        self.slots.tell(self.flags.forget)

    def can_draft(self, r: RequestRound) -> bool:
        return self.name not in r.state.failed_drafters and can_reach(
            r.state, self.model, r.seq_len + 1
        )

    def before_prefill(self, prefill: Prefill) -> None:
        """It catches up with a prompt when it first drafts behind it."""
        self.flags.forget(prefill.batch.out_cache_loc)

    def draft(self, round: Round) -> None:
        wanted = [(i, r, self._num_new(r)) for i, r in enumerate(round)]
        wanted = [one for one in wanted if one[2] > 0]
        if not wanted:
            return
        chosen = [r for _, r, _ in wanted]
        self._look_up([r for r in chosen if r.state not in self._memory])
        orders = [self._order(*one) for one in wanted]
        proposal = self.model.propose(
            orders,
            table=self.slots.table,
            sampling_info=round.batch.sampling_info,
            phase=DraftPhase.of(round, len(orders)),
        )
        round.num_read += proposal.num_read
        round.num_draft_steps += proposal.num_steps
        for k, r in enumerate(chosen):
            self._memory[r.state].num_cached = proposal.num_forwarded[k]
            r.is_drafting = not proposal.is_complete[k]
            if proposal.tokens[k] or proposal.ended[k]:
                r.draft = r.draft.extended(
                    self.name,
                    proposal.tokens[k],
                    ended=proposal.ended[k],
                    token_level=False,
                )

    def _num_new(self, r: RequestRound) -> int:
        """Tokens that it may write for a request; none where the number is below 1."""
        num_held = len(r.tokens) + len(r.draft.tokens)
        return min(room_for(r, self.name), self.model.reach - num_held)

    def _look_up(self, newcomers: Sequence[RequestRound]) -> None:
        """Begin with requests whose texts others may have left KV of."""
        rows = [self.slots.table[r.row, : r.seq_len] for r in newcomers]
        for r, known in zip(newcomers, self.flags.num_leading(rows), strict=True):
            self._memory[r.state] = ModelMemory(known, known)

    def _order(self, index: int, r: RequestRound, num_new: int) -> DraftRequest:
        """What it is to write for the request at `index` of the batch."""
        tokens, memory = [*r.tokens, *r.draft.tokens], self._memory[r.state]
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
        """Note which of the decided tokens have its KV."""
        spans = []
        for r in round:
            memory = self._memory.get(r.state)
            if memory is None:
                # What it lacks is looked up when it first drafts.
                spans.append((r.row, r.seq_len, r.seq_len, r.new_len))
                continue
            if not r.decision.pending:
                # Where the output left the draft, its KV is of other tokens.
                memory.num_cached = min(memory.num_cached, r.new_len)
            cached = min(memory.num_cached, r.new_len)
            # Where it has read nothing since, what it lacks may be long, and is known.
            has_read = cached > memory.num_flagged
            start = min(memory.num_flagged, r.seq_len) if has_read else r.seq_len
            spans.append((r.row, start, max(cached, start), r.new_len))
            memory.num_flagged = cached
        self.flags.mark(self.slots.table, spans)
