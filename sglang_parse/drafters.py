"""Who writes the draft of a round, and what each needs to know of what became of it.

Drafters take turns behind what a client's text or an earlier round left pending: the
target's EAGLE-3 head, then the draft model, each from where the one before it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_parse.decide import Decision
from sglang_parse.draft import DraftModel, DraftRequest
from sglang_parse.draft_cache import DraftCache
from sglang_parse.eagle import ChainRequest, EagleHead, HeadRows
from sglang_parse.grammar import GrammarChain
from sglang_parse.memory import RoundSlots
from sglang_parse.ranks import Ranks
from sglang_parse.request import wants_head, wants_verdict_only
from sglang_parse.state import RequestState, RoundDraft

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """The requests of a round and how much each may draft.

    seq_lens: tokens before the bonus token. windows: draft tokens a request may hold,
    pending ones included; head_windows: how many of them the EAGLE-3 head may write.
    chains: grammars, None for a request without one. judged: whether verdicts are asked
    for; else every draft is followed token by token. judge_every: at every so-manieth
    boundary.
    """

    batch: Any
    states: Sequence[RequestState]
    seq_lens: Sequence[int]
    windows: Sequence[int]
    head_windows: Sequence[int]
    chains: Sequence[GrammarChain | None]
    judged: bool = True
    judge_every: int = 1


@dataclass(frozen=True)
class FollowUp:
    """What a pass of the target decided for one request, for the drafters to follow.

    row: its row of req_to_token. start: the first position whose next token is new.
    tokens: those next tokens. features: [len(tokens), width] the target's hidden
    states at their positions, None without an EAGLE-3 head.
    """

    row: int
    state: RequestState
    start: int
    tokens: Sequence[int]
    features: Tensor | None


class Drafter(Protocol):
    """Extends the drafts of the requests it has a turn for."""

    def draft(self, turn: Turn, drafts: list[RoundDraft]) -> list[RoundDraft]: ...


def pending_drafts(turn: Turn) -> list[RoundDraft]:
    """What the requests have to be judged without anybody drafting, as far as their
    grammars allow it."""
    drafts = []
    for state, window, chain in zip(
        turn.states, turn.windows, turn.chains, strict=True
    ):
        tokens = state.pending[:window]
        if chain is not None:
            tokens = tokens[: chain.walk(tokens)]
        drafts.append(
            RoundDraft(
                tokens,
                state.pending_ended and len(tokens) == len(state.pending),
                num_client=min(len(tokens), state.num_client),
            )
        )
    return drafts


class ModelDrafter:
    """The draft model. Keeps which slots hold its KV."""

    def __init__(self, model: DraftModel, slots: RoundSlots, cache: DraftCache) -> None:
        self.model = model
        self.slots = slots
        self.cache = cache

    def draft(self, turn: Turn, drafts: list[RoundDraft]) -> list[RoundDraft]:
        orders = self._orders(turn, drafts)
        if not orders:
            return drafts
        proposal = self.model.propose(
            orders,
            table=self.slots.table,
            sampling_info=turn.batch.sampling_info,
        )
        drafts = list(drafts)
        for k, order in enumerate(orders):
            new, before = proposal.tokens[k], drafts[order.batch_index]
            drafts[order.batch_index] = RoundDraft(
                tokens=before.tokens + new,
                ended=proposal.ended[k],
                num_new=len(new),
                num_forwarded=proposal.num_forwarded[k],
                num_client=before.num_client,
                num_head=before.num_head,
            )
        return drafts

    def _orders(self, turn: Turn, drafts: Sequence[RoundDraft]) -> list[DraftRequest]:
        orders = []
        rows = turn.batch.req_pool_indices.tolist()
        for i, (req, state) in enumerate(
            zip(turn.batch.reqs, turn.states, strict=True)
        ):
            # Where a grammar cut what was pending, nobody drafts the more for it.
            held = min(len(state.pending), turn.windows[i])
            num_new = turn.windows[i] - max(held, len(drafts[i].tokens))
            chain = turn.chains[i]
            if num_new <= 0 or drafts[i].ended or (chain and chain.is_dead):
                continue
            tokens = [
                *req.origin_input_ids,
                *req.output_ids,
                *state.ready,
                *drafts[i].tokens,
            ]
            if state.num_cached is None:
                state.num_cached = self.cache.num_leading(
                    self.slots.table[rows[i], : turn.seq_lens[i]]
                )
            orders.append(
                DraftRequest(
                    row=rows[i],
                    tokens=tokens,
                    num_cached=min(state.num_cached, len(tokens) - 1),
                    num_new=num_new,
                    stop_ids=state.stop_ids,
                    batch_index=i,
                    grammar=chain,
                )
            )
        return orders

    def follow(
        self,
        turn: Turn,
        drafts: Sequence[RoundDraft],
        decisions: Sequence[Decision],
    ) -> None:
        """Note which of the decided tokens have the draft model's KV."""
        rows = turn.batch.req_pool_indices.tolist()
        for i, (state, decision) in enumerate(zip(turn.states, decisions, strict=True)):
            seq_len = turn.seq_lens[i]
            new_len = seq_len + len(decision.accept_tokens)
            if state.num_cached is None:
                first = cached = seq_len
            else:
                first = min(state.num_cached, seq_len)
                cached = max(state.num_cached, drafts[i].num_forwarded)
                # Where the output left the draft, the draft's KV is of other tokens.
                cached = cached if decision.pending else min(cached, new_len)
                state.num_cached = cached
            self.cache.mark(
                self.slots.table[rows[i], first:new_len], num_valid=cached - first
            )

    def follow_client(self, ups: Sequence[FollowUp]) -> None:
        """Behind a prompt a client's text was kept: none of it has the model's KV."""
        for up in ups:
            first = up.start + 1
            self.cache.forget(self.slots.table[up.row, first : first + len(up.tokens)])

    def follow_plain(self, turn: Turn, drafts: Sequence[RoundDraft]) -> None:
        """After a plain round: the token written at seq_lens has no KV, but where the
        model was asked, and said that the answer ends there."""
        rows, table = turn.batch.req_pool_indices, self.slots.table
        lens = torch.tensor(turn.seq_lens, device=rows.device)
        self.cache.forget(table[rows, lens])
        for i, (state, n) in enumerate(zip(turn.states, turn.seq_lens, strict=True)):
            if state.num_cached is None:
                continue
            cached = min(state.num_cached, n)
            state.num_cached = cached
            if drafts[i].num_forwarded > n:
                slots = table[rows[i], cached : n + 1]
                self.cache.mark(slots, num_valid=len(slots))
                state.num_cached = n + 1


class HeadDrafter:
    """The target's EAGLE-3 head. Follows every pass of the target, so that behind each
    request's last token a hint is at hand; keeps which slots hold its KV.

    read_features: `TargetVerifier.features_of`.
    """

    def __init__(
        self,
        head: EagleHead,
        slots: RoundSlots,
        cache: DraftCache,
        read_features: Callable[..., Tensor],
        ranks: Ranks,
    ) -> None:
        self.head = head
        self.slots = slots
        self.cache = cache
        self.read_features = read_features
        self.ranks = ranks

    def draft(self, turn: Turn, drafts: list[RoundDraft]) -> list[RoundDraft]:
        rows = turn.batch.req_pool_indices.tolist()
        index, orders = [], []
        for i, (state, limit) in enumerate(
            zip(turn.states, turn.head_windows, strict=True)
        ):
            if limit and state.hint is not None:
                index.append(i)
                orders.append(
                    ChainRequest(rows[i], turn.seq_lens[i], limit, state.hint)
                )
        if not orders:
            return drafts
        drafts = list(drafts)
        # Every rank runs the whole head.
        proposals = self.ranks.agree_all(self.head.propose(orders, self.slots.table))
        for i, tokens in zip(index, proposals, strict=True):
            stops = turn.states[i].stop_ids
            stop = next((k for k, t in enumerate(tokens) if t in stops), None)
            kept = tokens[:stop]
            drafts[i] = RoundDraft(kept, stop is not None, num_head=len(kept))
        return drafts

    def follow(self, ups: Sequence[FollowUp]) -> None:
        """Go along with what the target decided; a request without tokens waits."""
        followed = []
        for up in ups:
            slots = self.slots.table[up.row, up.start : up.start + len(up.tokens)]
            if not up.state.options.compose:
                self.cache.forget(slots)
            elif up.tokens:
                self.cache.mark(slots, num_valid=len(up.tokens))
                followed.append(up)
        if not followed:
            return
        rows = []
        for up in followed:
            assert up.features is not None
            rows.append(HeadRows(up.row, up.start, up.tokens, up.features))
        hints = self.head.follow(rows, self.slots.table)
        for up, hint in zip(followed, hints, strict=True):
            up.state.hint = hint

    def fill_gaps(self, batch: Any) -> list[bool]:
        """Before a prefill: give the head KV where a cached prefix has none of it.

        The target computes its hidden states there again, as if that part had not been
        cached; done once, the head's KV stays with the slots like the target's. Returns
        for which requests the head has all of the prefix: not where they want no head,
        nor where it would take longer than one prefill or more slots than there are, or
        nothing is generated that would pay for it.
        """
        rows, starts = batch.req_pool_indices.tolist(), batch.prefix_lens
        self.cache.forget(batch.out_cache_loc)
        left = min(self.head.longest_prefill, self.slots.num_free(batch.tree_cache))
        whole = []
        for req, row, prefix in zip(batch.reqs, rows, starts, strict=True):
            slots = self.slots.table[row, :prefix]
            gaps = self.cache.gaps(slots) if wants_head(req) else []
            num_missing = sum(end - start for start, end in gaps)
            most = 0 if wants_verdict_only(req) else left
            whole.append(wants_head(req) and num_missing <= most)
            if not gaps or not whole[-1]:
                continue
            left -= num_missing
            ids = [*req.origin_input_ids, *req.output_ids]
            for start, end in gaps:
                logger.debug("PARSE: head reads cached tokens %d to %d", start, end)
                self._read(batch, row, start, ids[start : end + 1])
                self.cache.mark(slots[start:end], num_valid=end - start)
        return whole

    def _read(self, batch: Any, row: int, start: int, ids: Sequence[int]) -> None:
        """ids: of cached positions from `start` on, and the token behind them."""
        table = self.slots.table
        scratch = self.slots.take_scratch(batch.tree_cache, len(ids) - 1)
        try:
            features = self.read_features(
                ids[:-1], row=row, start=start, scratch=scratch, table=table
            )
            self.head.follow([HeadRows(row, start, ids[1:], features)], table)
        finally:
            self.slots.release_scratch(scratch)

    def follow_prefill(
        self,
        batch: Any,
        states: Sequence[RequestState | None],
        features: Tensor,
        next_token_ids: Tensor,
        whole: Sequence[bool],
    ) -> None:
        """The target prefilled a batch.

        states: None for a request whose prefill goes on. features: [tokens of the
        batch, width]. whole: of `fill_gaps`; the others are not followed.
        """
        rows = batch.req_pool_indices.tolist()
        chosen = next_token_ids.tolist()
        followed, index, at = [], [], 0
        for i, req in enumerate(batch.reqs):
            start, num = batch.prefix_lens[i], batch.extend_lens[i]
            new, at = features[at : at + num], at + num
            if not whole[i]:
                continue
            slots = self.slots.table[rows[i], start : start + num]
            ids = [*req.origin_input_ids, *req.output_ids, chosen[i]]
            self.cache.mark(slots, num_valid=num)
            after = ids[start + 1 : start + num + 1]
            followed.append(HeadRows(rows[i], start, after, new))
            index.append(i)
        if not followed:
            return
        hints = self.head.follow(followed, self.slots.table)
        for i, hint in zip(index, hints, strict=True):
            state = states[i]
            if state is not None:
                state.hint = hint
