"""The draft of one request: tokens that the target has not verified yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_parse.reporting.drafters import Run, first_tokens


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that follow the bonus token of a request and await their verification.

    Tokens that the last pass left over come first, and drafters write behind them. A
    draft may take several draft phases until it is verified.
    """

    #: Draft token ids, without a stop token.
    tokens: tuple[int, ...] = ()
    #: Whether the response ends behind the last token.
    ended: bool = False
    #: Leading tokens that come from the client's own text.
    num_client: int = 0
    #: Leading tokens that are kept only where the target writes the same ones.
    num_token_level: int = 0
    #: Who wrote the tokens since the last pass, in order: (drafter's name, number).
    parts: tuple[Run, ...] = ()
    #: The same of the tokens that the last pass left over, without the client's.
    held: tuple[Run, ...] = ()
    #: Tokens that the draft model or another drafter of whole segments wrote.
    num_segment_level: int = 0

    def extended(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        ended: bool,
        token_level: bool,
    ) -> Draft:
        """The draft with new tokens of the drafter `name` behind it."""
        more = (*self.tokens, *tokens)
        num_segment_level = self.num_segment_level
        return replace(
            self,
            tokens=more,
            ended=ended,
            num_token_level=len(more) if token_level else self.num_token_level,
            num_segment_level=num_segment_level + (0 if token_level else len(tokens)),
            parts=_joined((*self.parts, (name, len(tokens)))),
        )

    def first(self, num: int) -> Draft:
        """The draft's first `num` tokens; the draft itself if that is all of it."""
        if num >= len(self.tokens):
            return self
        num_client = min(num, self.num_client)
        num_held = min(num, len(self.tokens) - self.num_new)
        return replace(
            self,
            tokens=self.tokens[:num],
            ended=False,
            num_client=num_client,
            num_token_level=min(num, self.num_token_level),
            parts=tuple(first_tokens(self.parts, num - num_held)),
            held=tuple(first_tokens(self.held, num_held - num_client)),
            num_segment_level=min(self.num_segment_level, num - num_held),
        )

    @property
    def num_new(self) -> int:
        """Tokens that were drafted since the last pass."""
        return sum(num for _, num in self.parts)

    @property
    def num_copied(self) -> int:
        """Of these, the tokens that were copied at no cost (`drafting.ngram`)."""
        return self.num_by("ngram")

    @property
    def num_left_over(self) -> int:
        """Tokens that the last pass left over."""
        return len(self.tokens) - self.num_new

    @property
    def written_by(self) -> tuple[Run, ...]:
        """Who wrote the tokens behind the client's, in order."""
        return (*self.held, *self.parts)

    def num_by(self, name: str) -> int:
        """Tokens that the drafter `name` wrote since the last pass."""
        return sum(num for drafter, num in self.parts if drafter == name)


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbouring runs of one drafter as one run."""
    joined: list[Run] = []
    for name, num in runs:
        if joined and joined[-1][0] == name:
            joined[-1] = (name, joined[-1][1] + num)
        else:
            joined.append((name, num))
    return tuple(joined)


class ChainCuts(Protocol):
    """What chains of a round are cut by (`policy.gate.ChainRule`)."""

    def starts(self, chances: Sequence[float], steps: int) -> list[bool]: ...
    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]: ...
