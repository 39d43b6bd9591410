"""The draft of one request in one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sglang_parse.reporting.drafters import Run


@dataclass(frozen=True, slots=True)
class Draft:
    """What the target has to judge of one request: tokens behind its bonus token.

    Tokens left over from an earlier round come first; drafters write behind them.
    """

    #: Draft token ids, without a stop token.
    tokens: tuple[int, ...] = ()
    #: Whether the response ends behind the last token.
    ended: bool = False
    #: Leading tokens that come from the client's own text.
    num_client: int = 0
    #: Leading tokens that are kept only where the target writes the same ones.
    num_token_level: int = 0
    #: Who wrote the new tokens, in order: (drafter's name, number of tokens).
    parts: tuple[Run, ...] = ()
    #: The same of the tokens left over from earlier rounds, without the client's.
    held: tuple[Run, ...] = ()
    #: Tokens that the draft model or another drafter of whole segments wrote.
    num_segment_level: int = 0
    #: Tokens that were copied at no cost (`drafting.ngram`).
    num_copied: int = 0

    def extended(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        ended: bool,
        token_level: bool,
        copied: bool = False,
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
            parts=(*self.parts, (name, len(tokens))),
            num_copied=self.num_copied + (len(tokens) if copied else 0),
        )

    @property
    def num_new(self) -> int:
        """Tokens that were drafted in this round."""
        return sum(num for _, num in self.parts)

    @property
    def written_by(self) -> tuple[Run, ...]:
        """Who wrote the tokens behind the client's, in order."""
        return (*self.held, *self.parts)

    def num_by(self, name: str) -> int:
        """Tokens that the drafter `name` wrote in this round."""
        return sum(num for drafter, num in self.parts if drafter == name)


class ChainCuts(Protocol):
    """What chains of a round are cut by (`policy.chains.ChainRule`)."""

    def starts(self, chances: Sequence[float], steps: int) -> list[bool]: ...
    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]: ...
