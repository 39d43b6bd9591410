"""A head of the target as a drafter: it follows every pass of the target.

After each request's last token it has a hint from which it continues. Its tokens are
kept only where the target writes the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sglang_parse.drafting.drafter import (
    Drafter,
    DrafterContext,
    DrafterResources,
    Prefill,
    PrefillRequest,
    extend_draft,
)
from sglang_parse.drafting.head_model import (
    Chain,
    ChainRequest,
    HeadHint,
    HeadModel,
    HeadRows,
)
from sglang_parse.drafting.heads import HEADS
from sglang_parse.drafting.kv_flags import KvFlags
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.options.request import wants_token_level, wants_verdict_only
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState

logger = logging.getLogger(__name__)

# Positions of a request that the head may lag behind the target while it does not
# draft. Reading them at once costs little more than one; their features stay in memory.
MOST_UNREAD = 16


@dataclass
class FollowedRequest:
    """What the head knows of one request."""

    #: Whether it follows the target; not where it lacks part of the prompt.
    follows: bool = True
    #: Where it continues, None if it cannot.
    hint: HeadHint | None = None
    #: Positions that it has not read yet; the hint is of those before them.
    unread: list[HeadRows] = field(default_factory=list)

    @property
    def num_unread(self) -> int:
        return sum(len(rows.tokens) for rows in self.unread)

    @property
    def can_go_on(self) -> bool:
        """Whether it has a hint, or will have once it has read."""
        return self.hint is not None or bool(self.unread)


class HeadDrafter(Drafter):
    """The head that `--speculative-parse-compose` names."""

    token_level = True
    reads_features = True

    def __init__(
        self, head: HeadModel, max_tokens: int, context: DrafterContext
    ) -> None:
        self.name = head.name
        self.head = head
        self.max_tokens = max_tokens
        self.ranks = context.ranks
        self.adaptive = context.config.adaptive
        self._memory: WeakKeyDictionary[RequestState, FollowedRequest] = (
            WeakKeyDictionary()
        )
        self._whole: set[int] = set()
        self._rests = False

    @classmethod
    def create(cls, context: DrafterContext) -> HeadDrafter | None:
        """None where the server has no head."""
        config = context.config
        if not config.composes:
            return None
        head = HEADS[config.compose](context)
        return cls(head, head.most_tokens or config.eagle_steps, context)

    @property
    def runners(self) -> Sequence[DraftRunner]:
        return (self.head,)

    def open(self, resources: DrafterResources) -> None:
        self.slots = resources.slots
        self.flags = KvFlags(resources.num_slots, self.slots.table.device)
        self.features_of = resources.features_of
        self.head.check_room()

    def can_draft(self, r: RequestRound) -> bool:
        return (
            r.grammar is None
            and self._of(r.state).can_go_on
            and self.name not in r.state.failed_drafters
        )

    # -- Prefill ---------------------------------------------------------------

    def before_prefill(self, prefill: Prefill) -> None:
        """Give the head KV where a cached prefix has none of it.

        The target computes its hidden states there again, as if that part had not been
        cached. Done once, the head's KV stays with the slots like the target's.

        A request is left out where it wants no head, where nothing is generated that
        would pay for it, and where the gap exceeds one prefill or the free slots.
        """
        batch = prefill.batch
        self.flags.forget(batch.out_cache_loc)
        self._whole = set()
        if self._rests:
            return
        left = min(self.head.longest_prefill, self.slots.num_free(batch.tree_cache))
        for i, one in enumerate(prefill.requests):
            num_filled = self._fill_gaps(batch, one, left)
            if num_filled is None:
                continue
            left -= num_filled
            self._whole.add(i)

    def _fill_gaps(self, batch: object, one: PrefillRequest, left: int) -> int | None:
        """How many cached positions it has read; None if the request is left out."""
        if not wants_token_level(one.req):
            return None
        slots = self.slots.table[one.row, : one.num_cached]
        gaps = self.flags.gaps(slots)
        num_missing = sum(end - start for start, end in gaps)
        if num_missing > (0 if wants_verdict_only(one.req) else left):
            return None
        ids = [*one.req.origin_input_ids, *one.req.output_ids]
        for start, end in gaps:
            logger.debug("PARSE: the head reads cached tokens %d to %d", start, end)
            self._read(batch, one.row, start, ids[start : end + 1])
        self.flags.mark(self.slots.table, [(one.row, s, e, e) for s, e in gaps])
        return num_missing

    def _read(self, batch: object, row: int, start: int, ids: Sequence[int]) -> None:
        """ids: of cached positions from `start` on, and the token behind them."""
        table = self.slots.table
        scratch = self.slots.take_scratch(batch.tree_cache, len(ids) - 1)  # type: ignore[attr-defined]
        try:
            features = self.features_of(
                ids[:-1], row=row, start=start, scratch=scratch, table=table
            )
            self.head.follow([HeadRows(row, start, ids[1:], features)], table)
        finally:
            self.slots.release_scratch(scratch)

    def after_prefill(
        self, prefill: Prefill, features: Tensor | None, next_tokens: Tensor
    ) -> None:
        for i, one in enumerate(prefill.requests):
            if one.state is not None and i not in self._whole:
                self._of(one.state).follows = False
        if features is None or not self._whole:
            return
        followed, rows, at, chosen = [], [], 0, next_tokens.tolist()
        for i, one in enumerate(prefill.requests):
            new, at = features[at : at + one.num_computed], at + one.num_computed
            if i not in self._whole:
                continue
            start, end = one.num_cached, one.num_cached + one.num_computed
            ids = [*one.req.origin_input_ids, *one.req.output_ids, chosen[i]]
            rows.append(HeadRows(one.row, start, ids[start + 1 : end + 1], new))
            followed.append(one)
        if not rows:
            return
        spans = [(h.row, h.start, (e := h.start + len(h.tokens)), e) for h in rows]
        self.flags.mark(self.slots.table, spans)
        hints = self.head.follow(rows, self.slots.table)
        for one, hint in zip(followed, hints, strict=True):
            if one.state is not None:
                self._of(one.state).hint = hint

    # -- Rounds ----------------------------------------------------------------

    def draft(self, round: Round) -> None:
        asked = [
            r
            for r in round
            if r.budgets.get(self.name, 0) and self._of(r.state).can_go_on
        ]
        if not asked:
            return
        self._catch_up([self._of(r.state) for r in asked])
        orders = [self._order(r) for r in asked]
        goes_on = self._starts(round, orders)
        chosen = [r for r, on in zip(asked, goes_on, strict=True) if on]
        if not chosen:
            return
        orders = [order for order, on in zip(orders, goes_on, strict=True) if on]
        # Every rank runs the whole head.
        chains = self.head.propose(orders, self.slots.table)
        lens = [len(chain.tokens) for chain in chains]
        if round.chains is not None:
            lens = round.chains.choose([chain.chances for chain in chains])
        drafts = self._agree(chains, lens)
        for r, chain, tokens in zip(chosen, chains, drafts, strict=True):
            if tokens:
                extend_draft(r, self, tokens)
                r.chances = chain.chances[: r.draft.num_by(self.name)]

    def _agree(
        self, chains: Sequence[Chain], lens: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Tokens of each chain as the first rank cuts them: each rank cuts by its own
        clock, or not at all yet."""
        if self.adaptive:
            (lens,) = self.ranks.agree_all([lens])
        pairs = zip(chains, lens, strict=True)
        return self.ranks.agree_all([chain.tokens[:num] for chain, num in pairs])

    def _order(self, r: RequestRound) -> ChainRequest:
        hint = self._of(r.state).hint
        assert hint is not None
        return ChainRequest(r.row, r.seq_len, r.budgets[self.name], hint)

    def _starts(self, round: Round, orders: Sequence[ChainRequest]) -> Sequence[int]:
        """Whose chains are worth more than their first tokens, which are there."""
        if not self.adaptive:
            return [1] * len(orders)
        starts = [1] * len(orders)
        if round.chains is not None:
            chances = torch.stack([o.hint.chance for o in orders]).tolist()
            steps = max(order.num_new for order in orders)
            starts = [int(on) for on in round.chains.starts(chances, steps)]
        (agreed,) = self.ranks.agree_all([starts])
        return agreed

    def after_pass(self, round: Round) -> None:
        """Go along with what the target decided; a request without tokens waits.

        A head that has not drafted reads it later: before it drafts, when much is
        unread, or when the request ends, so that a cached prefix has its KV.
        """
        behind, spans = [], []
        self._rests = round.head_rests
        for r in round:
            memory, tokens = self._of(r.state), r.decision.accept_tokens
            end = r.seq_len + len(tokens)
            spans.append((r.row, r.seq_len, r.seq_len, end))
            # Of several steps in a row there are no hidden states but the last.
            if (self._rests or round.num_steps > 1) and tokens:
                self._memory[r.state] = FollowedRequest(follows=False)
                continue
            if not (memory.follows and r.state.options.compose and tokens):
                continue
            first = r.root_row
            features = round.output.features[first : first + len(tokens)]
            reads = r.draft.num_by(self.name) or self._is_last(r)
            if not reads and memory.num_unread + len(tokens) <= MOST_UNREAD:
                # The pass's own tensor is large, or a captured graph writes into it.
                features = features.clone()
            else:
                behind.append(memory)
            memory.unread.append(HeadRows(r.row, r.seq_len, tokens, features))
        self.flags.mark(self.slots.table, spans)
        self._catch_up(behind)

    def _is_last(self, r: RequestRound) -> bool:
        """Whether nothing follows this round. An end by a stop string is not seen."""
        tokens = r.decision.accept_tokens
        if not r.state.stop_ids.isdisjoint(tokens):
            return True
        return r.output_len + len(tokens) >= r.req.sampling_params.max_new_tokens

    def _catch_up(self, behind: Sequence[FollowedRequest]) -> None:
        """Read what these requests have unread, all in one pass of the head."""
        behind = [memory for memory in behind if memory.unread]
        if not behind:
            return
        rows = [joined(memory.unread) for memory in behind]
        hints = self.head.follow(rows, self.slots.table)
        for memory, hint in zip(behind, hints, strict=True):
            memory.hint, memory.unread = hint, []
        spans = [(h.row, h.start, (e := h.start + len(h.tokens)), e) for h in rows]
        self.flags.mark(self.slots.table, spans)

    def _of(self, state: RequestState) -> FollowedRequest:
        return self._memory.setdefault(state, FollowedRequest())


def joined(rows: Sequence[HeadRows]) -> HeadRows:
    """Rows of one request that follow one another, as one."""
    if len(rows) == 1:
        return rows[0]
    tokens = [token for part in rows for token in part.tokens]
    features = torch.cat([part.features for part in rows])
    return HeadRows(rows[0].row, rows[0].start, tokens, features)
