"""Where the drafts of a round are judged, and what the target has to rewrite.

A draft is cut at the ends of its segments. A request that recovers from a rejection is
judged from the end of the segments that the target still writes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from sglang_parse.engine.failures import guard
from sglang_parse.judging.segmenter import Segmenter, thin
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.options.server import ParseConfig
from sglang_parse.requests.round_records import RequestRound, Round, Segments

# Committed text the segmenter sees before the segment that the draft begins or ends.
SEAM_TOKENS = 48
# Requests name segmenters as they like; so many are kept.
NUM_CACHED = 64


class Boundaries(Protocol):
    """`Segmenter.boundaries` of one draft, its keywords bound."""

    def __call__(self, *, settled: bool = False) -> tuple[int, ...]: ...


class Segmenting:
    """Cuts drafts by the rule that each request names.

    token_texts: text of every token id of the model's padded vocabulary. on_error: told
    where the segmenter of an installed package fails on a draft; that draft is followed
    token by token. closing: token ids that end thinking. Raises ValueError where the
    configured segmenter is not known.
    """

    def __init__(
        self,
        config: ParseConfig,
        token_texts: Sequence[str],
        on_error: Callable[[ExtensionError], None] = lambda error: None,
        closing: Collection[int] = (),
    ) -> None:
        self.on_error = on_error
        self._closing = frozenset(closing)
        self.max_segments = config.max_segments
        self._token_texts = token_texts
        self.segmenter: Callable[[str], Segmenter] = lru_cache(NUM_CACHED)(
            partial(Segmenter, token_texts=token_texts)
        )
        self.segmenter(config.segmenter)  # fail at start-up, not at the first request

    def segment(self, round: Round, *, room: int) -> None:
        """Fill `segments` of each request.

        room: scratch slots and rows of the pass that judge suffixes may take. They are
        shared evenly among the requests that are judged.
        """
        semantic = [
            r
            for r in round
            if r.state.options.mode == "semantic" and r.draft.tokens and not r.error
        ]
        if not round.judged:
            for r in semantic:
                r.segments = Segments(exact_end=len(r.draft.tokens))
            return
        for num_left, r in zip(range(len(semantic), 0, -1), semantic, strict=True):
            suffix_len = len(r.state.suffix) if r.rows_per_verdict is None else 0
            most = self.max_segments
            if suffix_len:
                most = min(most, room // num_left // suffix_len)
            guard(r, partial(self._try, most=most, judge_every=round.judge_every))
            room -= len(r.segments.boundaries) * suffix_len

    def _try(self, r: RequestRound, *, most: int, judge_every: int) -> None:
        """A user's segmenter that fails costs the request its verdicts: its draft is
        followed token by token."""
        try:
            r.segments = self._cut(r, most=most, judge_every=judge_every)
        except ExtensionError as error:
            self.on_error(error)
            r.segments = Segments(exact_end=len(r.draft.tokens))

    def _cut(self, r: RequestRound, *, most: int, judge_every: int) -> Segments:
        """most: verdicts that there is room for."""
        state, draft = r.state, r.draft
        if most == 0 and not state.recovering and not draft.num_token_level:
            return Segments()
        opened, before, begun = self._written(r)
        tokens = (*begun, *draft.tokens)
        find: Boundaries = partial(
            self.segmenter(state.options.segmenter).boundaries,
            tokens,
            ended=draft.ended,
            max_segments=len(tokens),
            previous_text=opened + self._text(before),
        )
        exact_end = draft.num_token_level
        if state.recovering:
            end = self._recovery_end(r, find(settled=True), len(tokens))
            exact_end = max(exact_end, end - len(begun))
        elif draft.num_client:
            exact_end = max(exact_end, self._fragment_end(r, opened, before))
        exact_end, next_part = self.head_end(r, exact_end)
        shifted = (b - len(begun) for b in find())
        found = tuple(b for b in shifted if b > exact_end)
        every = state.options.judge_every or judge_every
        if state.num_suspect > exact_end or draft.num_client:
            every = 1  # one of these segments is wrong, or they are a client's
        num_found, found = len(found), between(exact_end, found, next_part)
        most = min(most, math.ceil(len(found) / every))
        return Segments(
            boundaries=thin(found, most) if most else (),
            exact_end=exact_end,
            num_found=num_found,
        )

    def head_end(self, r: RequestRound, exact_end: int = 0) -> tuple[int, int]:
        """Leading draft tokens that are to be the target's own, also because the answer
        begins there, or what follows its thinking; and the place behind them, at most
        the draft's length, where the next such part begins or a special token stands,
        which no verdict may carry: it could open a turn in another's name.

        exact_end: those that are for another reason.
        """
        num, draft = r.state.options.exact_head, r.draft.tokens
        since = r.output_len  # tokens that are decided of this part
        last = [*r.req.output_ids[-num:], *r.state.ready][-num:] if num else []
        for at, token in enumerate(last):
            if token in self._closing:
                since = len(last) - 1 - at
        end = max(exact_end, num - since)
        for at, token in enumerate(draft):
            if num and token in self._closing:
                if at >= end:
                    return end, at + 1
                end = max(end, at + 1 + num)
            elif at >= end and not self._token_texts[token]:
                return end, at
        return min(end, len(draft)), len(draft)

    def _recovery_end(
        self, r: RequestRound, ends: Sequence[int], num_tokens: int
    ) -> int:
        """Tokens up to which the target still writes itself; ends: of its segments."""
        num = r.state.recovering
        return num_tokens if num > len(ends) else ends[num - 1]

    def _fragment_end(self, r: RequestRound, opened: str, before: Sequence[int]) -> int:
        """Where the answer came back to a client's text inside a segment, the end of
        that segment: the target wrote its beginning, and a judge that sees the client's
        end of it approves of too much. Else 0."""
        at = r.state.client.found_at if r.state.client else None
        since = len(r.req.output_ids) + len(r.state.ready) - (at or 0)
        if at is None or since > len(before):
            return 0
        tokens = (*before, *r.draft.tokens)
        ends = self.segmenter(r.state.options.segmenter).boundaries(
            tokens,
            ended=r.draft.ended,
            max_segments=len(tokens),
            previous_text=opened,
        )
        found = (b for b in ends if b >= len(before) - since)
        return max(0, next(found, len(tokens)) - len(before))

    def client_boundaries(self, r: RequestRound, *, most: int) -> tuple[int, ...]:
        """Boundaries of a client's text that follows the prompt, at most so many.

        Raises ExtensionError, counted already, where the segmenter fails on the text.
        """
        try:
            return self.segmenter(r.state.options.segmenter).boundaries(
                r.draft.tokens, ended=r.draft.ended, max_segments=most
            )
        except ExtensionError as error:
            self.on_error(error)
            raise

    def recover(self, r: RequestRound) -> None:
        """Note how many more segments the target writes itself after this decision.

        A segment may take the target many rounds: `num_begun` counts what it has. Where
        the segmenter fails, none has ended.
        """
        state, decision = r.state, r.decision
        rejected = bool(r.rejected_end)
        if rejected:
            state.recovering = state.options.recover_limit
        if not state.recovering or state.recovers_for_good:
            state.num_begun = 0
            return
        opened, before, begun = self._written(r)
        tokens = [*begun, *decision.accept_tokens]
        if rejected:
            start = len(begun) + decision.num_judged
            before, tokens = before + tokens[:start], tokens[start:]
        try:
            ends = self.segmenter(state.options.segmenter).boundaries(
                tokens,
                ended=False,
                max_segments=len(tokens),
                previous_text=opened + self._text(before),
                settled=True,
            )
        except ExtensionError as error:
            self.on_error(error)
            ends = ()
        state.recovering = max(0, state.recovering - len(ends))
        state.num_begun = len(tokens) - max(ends, default=0) if state.recovering else 0

    def _written(self, r: RequestRound) -> tuple[str, list[int], list[int]]:
        """The last committed tokens: SEAM_TOKENS of them, and behind these what a
        recovering target has written of a segment. In front of both, the line that
        opens the block of code that they begin in, "" where there is none."""
        state, output = r.state, r.req.output_ids
        reach = self.segmenter(state.options.segmenter).reach
        num_begun = min(state.num_begun, reach)
        most = SEAM_TOKENS + num_begun
        tokens: list[int] = [*output[-most:], *state.ready][-most:]
        start = len(tokens) - num_begun
        fences, num_output = state.fences, len(output)
        num_ready = max(0, fences.num_read - num_output)
        new = (*output[fences.num_read :], *state.ready[num_ready:])
        fences.read(self._token_texts[t] for t in new)
        first = num_output + len(state.ready) - len(tokens)
        return fences.open_before(first), tokens[:start], tokens[start:]

    def _text(self, tokens: Sequence[int]) -> str:
        return "".join(self._token_texts[t] for t in tokens)


def between(start: int, boundaries: Sequence[int], end: int) -> tuple[int, ...]:
    """The boundaries behind start and up to end; the first behind that moves there."""
    kept = {min(b, end) for b in boundaries}
    return tuple(sorted(b for b in kept if b > start))


def padded_texts(texts: Sequence[str], vocab_size: int) -> list[str]:
    """Model vocabularies are padded beyond the tokenizer's: those ids have no text."""
    return [*texts, *[""] * (vocab_size - len(texts))]


def first_empty(cuts: Sequence[int]) -> int | None:
    """The first of the segments ending at `cuts` that has no tokens."""
    starts = (0, *cuts)
    pairs: Any = enumerate(zip(starts, cuts, strict=False))
    return next((k for k, (start, end) in pairs if start == end), None)
