"""Counters of one request, each defined once, and its report to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from sglang_parse.options.table import HEADS
from sglang_parse.reporting.drafters import DrafterCounters, Run, first_tokens
from sglang_parse.reporting.round_log import ROUND_LOG
from sglang_parse.reporting.segments import SegmentTrail
from sglang_parse.reporting.text_offsets import with_text

# A drafter that had a counter of its own before there was one by name; heads had too.
MODEL = "model"


class TriedText(Protocol):
    """A client's text that was tried as a draft (`requests.client_text.ClientText`)."""

    @property
    def tokens(self) -> Sequence[int]:
        """Its token ids."""

    def num_accepted(self, output: Sequence[int]) -> int:
        """How many of its tokens stand in the output."""


@dataclass
class RequestCounters:
    """What PARSE did for one request."""

    #: Forwards of the target after the prefill.
    target_passes: int = 0
    #: Tokens that the draft model drafted.
    draft_tokens: int = 0
    #: Tokens that the target's head drafted.
    eagle_draft_tokens: int = 0
    #: Of those, the tokens that stand in the output.
    eagle_kept_tokens: int = 0
    #: Tokens of the client's own text that were tried as a draft.
    client_tokens: int = 0
    #: Segments that got a verdict; several under one verdict count as one.
    judged_segments: int = 0
    #: Of those, the segments whose verdict a probe gave.
    probe_segments: int = 0
    #: Of the judged, the segments that passed, even where a stop cut them off.
    kept_segments: int = 0
    #: Draft tokens under some verdict.
    judged_tokens: int = 0
    #: Drafted tokens and tokens of the client that stand in the output.
    kept_tokens: int = 0
    #: Of those, the client's.
    kept_client_tokens: int = 0
    #: Of the kept tokens, those that agreed with the target token by token.
    matched_tokens: int = 0
    #: Tokens of the output that the target wrote itself.
    written_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of one request, as the report counts it."""

    #: Output tokens before the round.
    output_len: int
    #: What the round decided: num_judged tokens kept by verdict, num_matched by
    #: agreement, then the target's own. Empty where a text was judged and nothing
    #: generated.
    accept_tokens: Sequence[int]
    #: What was verified.
    draft_tokens: Sequence[int] = ()
    #: Leading draft tokens that come from the client.
    num_client: int = 0
    #: Who wrote tokens in this round, in order.
    drafted_by: Sequence[Run] = ()
    #: Who wrote the draft tokens behind the client's, also in rounds before, in order.
    written_by: Sequence[Run] = ()
    #: Leading draft tokens that must equal the target's own; verdicts stand behind
    #: them.
    exact_end: int = 0
    #: Offsets into the draft behind which the judge was asked, rising.
    boundaries: Sequence[int] = ()
    #: The verdict at each boundary, 0 to 1.
    scores: Sequence[float] = ()
    #: Who gave it: `suffix` or `probe`; empty for `suffix` everywhere.
    judged_by: Sequence[str] = ()
    #: Draft tokens kept by verdict.
    num_judged: int = 0
    #: Draft tokens behind them that agreed with the target's own.
    num_matched: int = 0
    #: Passes of the target that the round took.
    num_passes: int = 1
    #: Why no verdict was asked for although the request may have some, "" otherwise.
    not_judged: str = ""

    def drafted(self, *names: str) -> int:
        """Tokens that the drafters of these names wrote in this round."""
        return sum(num for drafter, num in self.drafted_by if drafter in names)

    @property
    def num_kept(self) -> int:
        """Draft tokens that were kept."""
        return self.num_judged + self.num_matched

    @property
    def num_agreed(self) -> int:
        """Kept draft tokens that equal the target's own, in front of the verdicts and
        behind them."""
        return self.num_matched + min(self.exact_end, self.num_judged)

    @property
    def kept_by(self) -> Sequence[Run]:
        """Who wrote the tokens that were kept, the client's left out."""
        return tuple(first_tokens(self.written_by, self.num_kept - self.num_client))

    def only_kept(self, num_tokens: int) -> RoundRecord:
        """What is counted as kept of it, where only its first num_tokens stand."""
        num_judged = min(self.num_judged, num_tokens)
        return RoundRecord(
            self.output_len,
            (),
            num_client=self.num_client,
            drafted_by=self.drafted_by,
            written_by=self.written_by,
            exact_end=self.exact_end,
            num_judged=num_judged,
            num_matched=min(self.num_matched, num_tokens - num_judged),
        )


@dataclass
class RequestReport:
    """`meta_info["parse"]` of one request."""

    #: `semantic`, `exact`, `off` or `verify`, as the request was served.
    mode: str
    #: Why it was not served as asked, "" if it was.
    fallback: str
    #: Whether the client asked for `segments`.
    want_segments: bool
    #: Who judged its drafts, "" where nobody does.
    judge: str = ""
    counters: RequestCounters = field(default_factory=RequestCounters)
    drafters: DrafterCounters = field(default_factory=DrafterCounters)
    trail: SegmentTrail = field(default_factory=SegmentTrail)
    #: All verdicts, in the order of the rounds.
    scores: list[float] = field(default_factory=list)
    #: The text that came with the request, None without one.
    client: TriedText | None = None
    #: Output tokens that are in the counters.
    num_counted: int = 0
    #: The text of a request that has it judged and nothing generated.
    judged_text: tuple[int, ...] | None = None
    #: Rounds without verdicts by the policy's choice, and the last one's reason.
    num_not_judged: int = 0
    not_judged: str = ""
    #: Rounds with kept tokens in the output, as far as these are in it.
    _kept: list[RoundRecord] = field(default_factory=list)

    def record(self, one: RoundRecord) -> None:
        """Count one round. Tokens that prefill sampled before it are the target's."""
        self._count_written(one.output_len)
        ROUND_LOG.add(one)
        c = self.counters
        c.target_passes += one.num_passes
        c.draft_tokens += one.drafted(MODEL)
        c.eagle_draft_tokens += one.drafted(*HEADS)
        c.client_tokens += one.num_client
        self.drafters.add_drafted(one.drafted_by)
        c.judged_segments += len(one.boundaries)
        c.probe_segments += sum(name == "probe" for name in one.judged_by)
        if one.not_judged:
            self.num_not_judged += 1
            self.not_judged = one.not_judged
        self.scores += one.scores
        c.kept_segments += sum(1 for b in one.boundaries if b <= one.num_judged)
        if one.boundaries:
            c.judged_tokens += one.boundaries[-1] - one.exact_end
        if not one.accept_tokens:
            self.judged_text = tuple(one.draft_tokens)
        else:
            self._count_kept(one.only_kept(one.num_kept))
            c.written_tokens += len(one.accept_tokens) - one.num_kept
            self.num_counted += len(one.accept_tokens)
        if self.want_segments:
            self.trail.add_round(one)

    def record_plain(self, output_len: int, reason: str = "") -> None:
        """Count a round in which nobody drafted: the target wrote one token.

        reason: why no verdict was asked for although the request may have some.
        """
        self._count_written(output_len)
        ROUND_LOG.add_round(reason)
        self.counters.target_passes += 1
        self.counters.written_tokens += 1
        self.num_counted += 1
        if reason:
            self.num_not_judged += 1
            self.not_judged = reason
        if self.want_segments:
            self.trail.write(output_len, 1)

    def finish(self, output_ids: Sequence[int]) -> None:
        """The request ended with these tokens: a stop may have cut rounds off, a
        retraction tokens that were decided ahead."""
        if self.judged_text is not None:
            return
        self._count_written(len(output_ids))
        self._take_back(len(output_ids))
        self.trail.end(output_ids)

    def as_dict(
        self, output_ids: Sequence[int], decode: Callable[[list[int]], str]
    ) -> dict[str, Any]:
        """The finished report. decode: token ids to text."""
        result: dict[str, Any] = {
            "mode": self.mode,
            **asdict(self.counters),
            **self.drafters.as_dict(),
        }
        if self.judge:
            result["judge"] = self.judge
        if self.fallback:
            result["fallback"] = self.fallback
        if self.num_not_judged:
            result["not_judged"] = {
                "rounds": self.num_not_judged,
                "reason": self.not_judged,
            }
        if self.client is not None and self.judged_text is None:
            result["client_text_tokens"] = len(self.client.tokens)
            result["accepted_client_text_tokens"] = self.client.num_accepted(output_ids)
        if self.want_segments:
            ids = output_ids if self.judged_text is None else self.judged_text
            result["segments"] = with_text(self.trail.spans, ids, decode)
        return result

    def _count_written(self, output_len: int) -> None:
        """Count the tokens up to output_len that no round brought."""
        num_written = output_len - self.num_counted
        if num_written <= 0:
            return
        if self.want_segments:
            self.trail.write(self.num_counted, num_written)
        self.counters.written_tokens += num_written
        self.num_counted = output_len

    def _count_kept(self, one: RoundRecord, sign: int = 1) -> None:
        if not one.num_kept:
            return
        c = self.counters
        c.kept_tokens += sign * one.num_kept
        c.kept_client_tokens += sign * min(one.num_client, one.num_kept)
        c.eagle_kept_tokens += sign * min(one.drafted(*HEADS), one.num_kept)
        c.matched_tokens += sign * one.num_agreed
        self.drafters.add_kept(one.kept_by, sign)
        if sign > 0:
            self._kept.append(one)

    def _take_back(self, output_len: int) -> None:
        """Count nothing behind the first output_len tokens."""
        if self.num_counted <= output_len:
            return
        while self._kept:
            one = self._kept[-1]
            left = max(0, output_len - one.output_len)
            if left >= one.num_kept:
                break
            self._kept.pop()
            self._count_kept(one, -1)
            self._count_kept(one.only_kept(left))
        self.counters.written_tokens = output_len - self.counters.kept_tokens
        self.num_counted = output_len


# Of each running request (SGLang's Req): the worker writes it, and SGLang's output
# streamer, in the same process, sends it.
_reports: WeakKeyDictionary[Any, RequestReport] = WeakKeyDictionary()


def attach(req: Any, report: RequestReport) -> None:
    """Make `report` the report of `req`."""
    _reports[req] = report


def report_of(req: Any) -> RequestReport | None:
    return _reports.get(req)
