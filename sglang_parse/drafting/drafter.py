"""The interface of a drafter: all that the engine asks of what writes drafts.

Drafters take turns behind what an earlier round left pending, each from where the one
before it stopped. The engine never asks which drafter it talks to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.scheduler_types import SchedulerBatch, SchedulerRequest

if TYPE_CHECKING:
    from sglang_parse.drafting.runner import DraftRunner

#: In the report of a request that is longer than its draft model reads.
OUT_OF_REACH = "draft_context"
# A shorter draft at the end of what a model reads is not worth a pass.
LEAST_DRAFT = 8


@dataclass(frozen=True)
class PrefillRequest:
    """One request of a prefill batch."""

    #: SGLang's request.
    req: SchedulerRequest
    #: None while the prefill of its prompt goes on in a later batch.
    state: RequestState | None
    #: Its row of req_to_token.
    row: int
    #: Tokens whose KV the radix cache had, and tokens that this prefill computes.
    num_cached: int
    num_computed: int

    @property
    def has_text(self) -> bool:
        """Whether a client's text is judged behind its prompt."""
        return self.state is not None and self.state.awaits_judgement(self.req)


@dataclass(frozen=True)
class Prefill:
    """A prefill batch as drafters see it."""

    #: SGLang's batch.
    batch: SchedulerBatch
    requests: Sequence[PrefillRequest]


class Drafter(Protocol):
    """Writes drafts. It keeps its own memory of a request, by its `RequestState`.

    A drafter of an installed package subclasses this, and has at least a `name`,
    `token_level` and `draft`.

    What a drafter raises costs the requests of that round this drafter and no token:
    they continue without it, and the error is counted and logged once.
    """

    #: Its label in reports, metrics and traces.
    name: str
    #: Whether its tokens are kept only where the target writes the same ones.
    token_level: bool
    #: Most tokens it writes at a time, 0 without a bound of its own. A drafter that
    #: works token by token needs a bound.
    max_tokens: int = 0
    #: Whether it reads the target's hidden states of a pass.
    reads_features: bool = False

    @property
    def runners(self) -> Sequence[DraftRunner]:
        """Its models, whose memory and graphs SGLang sets up with the target's."""
        return ()

    def open(self, resources: DrafterResources) -> None:
        """Memory pools exist now. Raises ValueError where there is not enough room."""
        return None

    def can_draft(self, r: RequestRound) -> bool:
        """Whether it could write for this request now."""
        return True

    def before_prefill(self, prefill: Prefill) -> None:
        """The target is about to compute these tokens."""
        return None

    def after_prefill(
        self, prefill: Prefill, features: Tensor | None, next_tokens: Tensor
    ) -> None:
        """The target has computed them.

        features: [tokens of the batch, width] its hidden states, None unless
        `reads_features`. next_tokens: [requests] int64, the token it sampled after
        each.
        """
        return None

    def draft(self, round: Round) -> None:
        """Extend `draft` of requests by at most `RequestRound.room` of this drafter.

        It sets `RequestRound.is_drafting` of a request whose draft it would extend
        further in the next draft phase; the request then waits with its pass.
        """

    def after_pass(self, round: Round) -> None:
        """A pass of the target has decided: `decision` of each request is set."""
        return None

    def flush(self) -> None:
        """Forget KV of its own: caches are flushed, and no request runs. The weights or
        the memory of the pools may have changed."""
        return None


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is built from at start-up."""

    #: ParseConfig of the server.
    config: Any
    #: SGLang's ServerArgs, and two numbers that its workers are made with.
    server_args: Any
    gpu_id: int
    nccl_port: int
    #: The target's ModelRunner, its longest context in tokens, its padded vocabulary.
    target: Any
    context_len: int
    vocab_size: int
    #: `sgl.ranks.Ranks`.
    ranks: Any
    #: The target's tokenizer.
    tokenizer: Any = None


@dataclass(frozen=True)
class DrafterResources:
    """What a drafter works with once SGLang has allocated its pools."""

    #: `sgl.slots.RoundSlots`.
    slots: Any
    #: Slots of the KV pool.
    num_slots: int
    #: Computes the target's hidden states at cached positions again
    #: (`verify.passes.TargetVerifier.features_of`).
    features_of: Any


def room_for(r: RequestRound, drafter: str) -> int:
    """New tokens that a drafter of whole segments may write now. Where a grammar cut
    what was pending, nothing is drafted in its place."""
    held = min(len(r.state.pending), r.window)
    return max(0, min(r.room(drafter), r.window - held))


def can_reach(state: RequestState, model: Any, num_tokens: int) -> bool:
    """Whether a model may still write behind so many tokens of its own; if it may not,
    the request's report says so. model: a `DraftModel`."""
    if num_tokens + LEAST_DRAFT <= model.reach:
        return True
    state.report.fallback = state.report.fallback or OUT_OF_REACH
    return False


def extend_draft(
    r: RequestRound, drafter: Drafter, tokens: Sequence[int], *, ended: bool = False
) -> None:
    """Extend a draft up to the first token that ends the response or that a grammar
    refuses. ended: whether the response ends with the tokens."""
    stop_ids = r.state.stop_ids
    stop = next((k for k, token in enumerate(tokens) if token in stop_ids), None)
    if stop is not None:
        tokens, ended = tokens[:stop], True
    if r.grammar is not None and tokens:
        allowed = r.grammar.walk(tokens)
        tokens, ended = tokens[:allowed], ended and allowed == len(tokens)
    if tokens or ended:
        r.draft = r.draft.extended(
            drafter.name, tokens, ended=ended, token_level=drafter.token_level
        )
