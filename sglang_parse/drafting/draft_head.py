"""A head of the draft model: it guesses what that model writes next.

It reads the draft's hidden states as a head of the target reads the target's, and its
KV lies at the same slots. The draft checks each guess, so KV that is missing or of
another text costs agreement and never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.drafting.head_model import (
    ChainRequest,
    HeadHint,
    HeadModel,
    HeadRows,
)
from sglang_parse.drafting.heads import DRAFT_HEADS
from sglang_parse.drafting.lanes import Lane, Lanes
from sglang_parse.drafting.pace import LONGEST, Pace
from sglang_parse.sgl.readback import wait_for

if TYPE_CHECKING:
    from sglang_parse.drafting.draft_model import DraftModel

# A guess is checked where it is at least so likely that it is reached and holds.
LEAST_CHANCE = 0.2


class DraftHead:
    """The head that `--speculative-parse-draft-compose` names."""

    def __init__(
        self, head: HeadModel, draft: DraftModel, ranks: Any, *, adaptive: bool
    ) -> None:
        """adaptive: whether its chains are as long as is measured to pay."""
        self.model, self.draft, self.ranks = head, draft, ranks
        self.adaptive, self.pace = adaptive, Pace()

    @classmethod
    def create(cls, context: DrafterContext, draft: DraftModel) -> DraftHead | None:
        """None where the draft has no head."""
        config = context.config
        if config.draft_guesser not in DRAFT_HEADS:
            return None
        own = replace(context, target=draft.runner, context_len=draft.reach)
        head = DRAFT_HEADS[config.draft_guesser](own)
        return cls(head, draft, context.ranks, adaptive=config.adaptive)

    def choose(self, num_lanes: int) -> int:
        """Guesses of each lane in a step of the next phase, 0 to draft without the
        head. A collective."""
        if not self.adaptive:
            return LONGEST
        return int(self.ranks.agree(self.pace.choose(num_lanes)))

    def timed(self, most: int, device: Any, write: Callable[[], Lanes]) -> Lanes:
        """The lanes of a phase, whose time counts for its number of guesses."""
        wait_for(device)
        start = perf_counter()
        lanes = write()
        num_tokens, took = sum(len(one.tokens) for one in lanes), perf_counter() - start
        self.pace.note(len(lanes), most, num_tokens, took)
        return lanes

    def follow(
        self,
        read: Sequence[tuple[int, int, int, Sequence[int]]],
        output: Any,
        table: Tensor,
    ) -> list[HeadHint]:
        """Read what the draft has read; a hint for each entry of `read`, which is a row
        of req_to_token, the first row of the output, its position, and the tokens
        behind this position and those after it."""
        features = output.hidden_states  # final ones, or of the layers that are shown
        rows = [
            HeadRows(
                *(row, position),
                [self.draft.readable(t) for t in tokens],
                features[at : at + len(tokens)],
            )
            for row, at, position, tokens in read
        ]
        return self.model.follow(rows, table) if rows else []


class HeadGuesses:
    """What the head guesses in one draft phase; it knows nothing before its first step.

    most: guesses of each lane in a step. table: req_to_token.
    """

    def __init__(self, head: DraftHead, most: int, table: Tensor) -> None:
        self._head, self._most, self._table = head, most, table
        self._hints: dict[Lane, HeadHint] = {}

    def guess(self, lanes: Sequence[Lane], most: Sequence[int]) -> list[list[int]]:
        """At most `most` tokens for each lane. A collective."""
        orders = {
            lane: ChainRequest(
                *(lane.request.row, lane.start + lane.num_forwarded),
                *(min(num, self._most), self._hints[lane]),
            )
            for lane, num in zip(lanes, most, strict=True)
            if num > 0 and lane in self._hints
        }
        if not orders:
            return [[] for _ in lanes]
        chains = self._head.model.propose([*orders.values()], self._table)
        agree = self._head.ranks.agree_all
        (lens,) = agree([[num_likely(chain.chances) for chain in chains]])
        pairs = zip(chains, lens, strict=True)
        tokens = agree([chain.tokens[:num] for chain, num in pairs])
        found = dict(zip(orders, tokens, strict=True))
        return [[*found.get(lane, ())] for lane in lanes]

    def follow(self, read: Sequence[tuple[Lane, int, int]], output: Any) -> None:
        """The draft has read a step of each lane: its first row of the output, and that
        row's position. What it read of wrong guesses is left out."""
        kept = {}
        for lane, at, position in read:
            num = lane.start + lane.num_forwarded - position
            # Behind the last row nothing stands where a stop token was.
            if tokens := lane.behind(position + 1)[:num]:
                kept[lane] = (lane.request.row, at, position, tokens)
        hints = self._head.follow([*kept.values()], output, self._table)
        self._hints = dict(zip(kept, hints, strict=True))


def num_likely(chances: Sequence[float]) -> int:
    """Leading tokens that hold together with LEAST_CHANCE. chances: of each token, if
    those before it hold."""
    chance = 1.0
    for num, one in enumerate(chances):
        chance *= one
        if chance < LEAST_CHANCE:
            return num
    return len(chances)
