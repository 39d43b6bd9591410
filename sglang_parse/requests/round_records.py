"""One round of PARSE as data.

A request has one record for each stage of the engine (`sglang_parse/engine/round.py`).
A stage builds its record from those before it, and no later stage changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sglang_parse.judging.decide import Cut, Decision
from sglang_parse.requests.draft import ChainCuts, Draft
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.scheduler_types import RoundBatch, SchedulerRequest

if TYPE_CHECKING:
    from sglang_parse.sgl.grammar import GrammarChain


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the draft of a request is judged."""

    #: Offsets into the draft after which there is a verdict, rising.
    boundaries: tuple[int, ...] = ()
    #: Those of them that get no judge suffix in the pass.
    without_suffix: frozenset[int] = frozenset()
    #: Leading draft tokens that only the target's own choice can confirm.
    exact_end: int = 0
    #: Segments found after exact_end, whether they are judged or not.
    num_found: int = 0

    @property
    def suffix_boundaries(self) -> tuple[int, ...]:
        """Boundaries that get a judge suffix in the pass."""
        if not self.without_suffix:
            return self.boundaries
        return tuple(b for b in self.boundaries if b not in self.without_suffix)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target, or a probe, says of the prefixes that end at the boundaries."""

    #: One for each boundary: P(yes) / (P(yes) + P(no)) after a judge suffix.
    scores: tuple[float, ...] = ()
    #: The score from which on each prefix is valid; empty where the request's own
    #: threshold holds for all.
    thresholds: tuple[float, ...] = ()
    #: Who gave each score; empty for `suffix` everywhere.
    judged_by: tuple[str, ...] = ()
    #: Passes of the target that the round took.
    num_passes: int = 1
    #: Whether the judge raised. Then nothing is judged, and the target is followed
    #: along the tokens that it was shown.
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of the draft."""

    cut: Cut = Cut(0, 0, reuse_tail=False)
    decision: Decision = Decision((), 0, 0, ())
    #: Rows of the round's samples that hold the target's own tokens.
    places: tuple[int, ...] = ()


@dataclass(slots=True)
class RequestRound:
    """One request in one round. Each record is written once, in this order."""

    #: SGLang's request, and what PARSE remembers of it.
    req: SchedulerRequest
    state: RequestState
    #: Its row of req_to_token.
    row: int
    #: Tokens before the bonus token; their KV is in place.
    seq_len: int
    #: The last decided token. Its KV is not written yet.
    bonus_token: int
    #: Output tokens before this round, those decided ahead included.
    output_len: int
    grammar: GrammarChain | None = None

    # open
    #: Rows of the pass that a verdict takes on average, None where each has a suffix.
    rows_per_verdict: float | None = None

    # plan
    #: Draft tokens it may hold by its options, its response and the context.
    limit: int = 0
    #: Draft tokens it may hold in this round, pending ones included.
    window: int = 0
    #: New draft tokens from which on it joins a pass that begins for others.
    num_enough: float = math.inf
    #: Whether drafters of whole segments write for it, behind the others. They do not
    #: fill up a window that is a head's alone.
    by_segments: bool = False
    #: Drafter's name -> most tokens it may write; a drafter without one writes none.
    budgets: dict[str, int] = field(default_factory=dict)

    # draft
    draft: Draft = Draft()
    #: Whether its drafter goes on with the draft in the next draft phase. Until then
    #: the request takes no part in passes.
    is_drafting: bool = False
    #: Chance of each token of a head, in the head's own opinion, if those before it
    #: stand; the draft begins with them.
    chances: tuple[float, ...] = ()

    segments: Segments = Segments()
    #: Row of the pass that holds the bonus token.
    root_row: int = 0
    verdict: Verdict = Verdict()
    kept: Kept = Kept()

    #: What went wrong with this request alone; it gets no further stage.
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """End the request: the stages that follow find nothing to do for it."""
        self.error, self.is_drafting = error, False
        self.draft, self.segments = Draft(), Segments()
        self.verdict, self.kept = Verdict(), Kept()

    @property
    def shown(self) -> tuple[int, ...]:
        """The draft tokens that the target is to see.

        Nothing after the last boundary can be kept in this round, whatever the
        verdicts. Those tokens wait for a boundary of their own.
        """
        cuts = self.segments.boundaries
        return self.draft.tokens[: cuts[-1]] if cuts else self.draft.tokens

    @property
    def verified(self) -> tuple[int, ...]:
        """The draft tokens that are cut; the others are lost if the judge failed."""
        return self.shown if self.verdict.has_failed else self.draft.tokens

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Offsets into the draft at which it was judged."""
        return () if self.verdict.has_failed else self.segments.boundaries

    @property
    def exact_end(self) -> int:
        """Leading draft tokens that only the target's own choice can confirm."""
        if self.verdict.has_failed:
            return len(self.shown)
        return self.segments.exact_end

    @property
    def decision(self) -> Decision:
        return self.kept.decision

    @property
    def suffix_rows(self) -> float:
        """Rows of the pass that a verdict takes on average."""
        own = self.rows_per_verdict
        return len(self.state.suffix) if own is None else own

    @property
    def tokens(self) -> list[int]:
        """The prompt and what is decided so far; the bonus token is the last."""
        return [*self.req.origin_input_ids, *self.req.output_ids, *self.state.ready]

    def room(self, drafter: str) -> int:
        """Tokens that this drafter may write now, behind what stands already."""
        if self.draft.ended or (self.grammar is not None and self.grammar.is_dead):
            return 0
        left = self.window - len(self.draft.tokens)
        return max(0, min(left, self.budgets.get(drafter, 0)))

    @property
    def tokens_left(self) -> int:
        """Tokens that its answer may still have, at least the next one."""
        return max(1, self.req.sampling_params.max_new_tokens - self.output_len)

    @property
    def is_at_its_end(self) -> bool:
        """Whether the tokens that it was given end its answer, as far as tokens do."""
        tokens = self.decision.accept_tokens
        stops = self.state.stop_ids
        return len(tokens) >= self.tokens_left or any(t in stops for t in tokens)

    @property
    def num_columns(self) -> int:
        """Slots for the bonus token, the draft, and the token behind a draft that is
        kept whole, where the answer goes on there."""
        longest = 1 + self.window
        return longest + (longest < self.tokens_left)

    @property
    def has_stop_text(self) -> bool:
        """Whether its answer may end at a string or an expression."""
        params = self.req.sampling_params
        return bool(params.stop_strs or params.stop_regex_strs)

    @property
    def new_len(self) -> int:
        """Tokens before the next round's bonus token."""
        return self.seq_len + len(self.decision.accept_tokens)

    @property
    def rejected_end(self) -> int:
        """End of the segment at which a verdict ended what is kept, 0 if none did."""
        cut = self.kept.cut
        return cut.rejected_end if cut.failed_at_verdict(self.decision) else 0


@dataclass(slots=True)
class Round:
    """The requests of one round, and what holds for all of them.

    A round is planned and drafted for all running requests. Its pass is a round of its
    own, of those requests whose drafts are complete (`of`).
    """

    #: SGLang's batch: exactly these requests, in this order.
    batch: RoundBatch
    requests: list[RequestRound]
    #: Requests that are not admitted yet and that a shorter round would help.
    num_waiting: int = 0
    #: Whether something came for the scheduler that it has not read.
    has_mail: Callable[[], bool] = lambda: False
    #: Whether requests may be given tokens of several passes before the scheduler is
    #: asked again.
    may_repeat: bool = False
    #: Requests that run, with those that take no part in the pass.
    num_running: int = 0
    #: Whether verdicts are asked for; else drafts are followed token by token.
    judged: bool = True
    #: A verdict stands at every N-th boundary of requests that do not say themselves.
    judge_every: int = 1
    #: What chains of single tokens are cut by, None to show them whole.
    chains: ChainCuts | None = None
    #: Whether drafters of single tokens read nothing of what the target reads, from
    #: this round on.
    head_rests: bool = False
    #: Tokens that draft models read before they drafted, prompts above all, beside the
    #: one that every request reads.
    num_read: int = 0
    #: Most steps of the draft phase, and of requests that wait for their pass in it,
    #: summed over these. The phase ends at either, or when all drafts are complete.
    most_draft_steps: int = 1 << 30
    most_idle_steps: float = math.inf
    #: Most tokens of long texts that draft models read in the draft phase.
    most_read: int = 1 << 30
    #: Whether the scheduler has to be asked now, the same on all ranks.
    is_due: Callable[[], bool] = lambda: False
    #: Decode steps of the draft model that ran in the draft phase.
    num_draft_steps: int = 0
    #: Decode steps, and so tokens of each request, where nobody holds a draft.
    num_steps: int = 1
    #: Why drafts are not judged, in words; "" where they are, or nobody asks for it.
    reason: str = ""
    #: The target's pass (`verify.output.PassOutput`), once it has run.
    output: Any = None
    #: Logprobs of the sampled rows, in the order of `RequestRound.places`.
    sampled: Any = None
    #: Rows of the pass.
    num_rows: int = 0
    #: Seconds from the end of the round before it, which the scheduler took; 0 where
    #: other work lay between them.
    between: float = 0.0
    #: Seconds by stage: draft; then layout, verify, decide; or plain, follow.
    seconds: dict[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RequestRound]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def of(self, requests: Sequence[RequestRound], batch: RoundBatch) -> Round:
        """The round of some of the requests alone. batch: of these."""
        return replace(self, batch=batch, requests=list(requests), seconds={})

    @property
    def is_drafted(self) -> bool:
        """Whether anybody holds a draft."""
        return any(r.draft.tokens for r in self.requests)

    @property
    def num_draft_rows(self) -> int:
        """Rows of the pass that bonus tokens and drafts take; the rest are asked."""
        return sum(1 + len(r.shown) for r in self.requests)

    @property
    def has_semantic(self) -> bool:
        """Whether there is anybody whose drafts may be judged."""
        return any(r.state.options.mode == "semantic" for r in self.requests)
