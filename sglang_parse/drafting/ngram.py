"""The n-gram drafter: it copies what followed where the last tokens stood before.

It reads the prompt and the answer, and needs no model. What it writes is kept only
where the target writes the same. It keeps looking while others draft, so that what its
copies would give is known before one is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sglang_parse.drafting.drafter import Drafter, DrafterContext
from sglang_parse.drafting.ngram_index import NgramIndex
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState

logger = logging.getLogger(__name__)

# Tokens that are copied at a time.
MAX_TOKENS = 64


class CopyOutcome(NamedTuple):
    """How long a copy lasted, counted from its match on."""

    #: Tokens that agreed when it began, and when it was last looked at.
    start: int
    end: int
    #: Whether the next token ended it.
    ended: bool


@dataclass
class CopiedText:
    """What it knows of one request."""

    index: NgramIndex
    #: Where a copy would go on, -1 without a match; tokens before it that agree, and
    #: how many of them its outcomes have told.
    cursor: int = -1
    length: int = 0
    told: int = 0
    #: Where the copy before it ended.
    near: int = 0


class NgramDrafter(Drafter):
    """`ngram` of `--speculative-parse-drafters`."""

    name = "ngram"
    token_level = True

    max_tokens = MAX_TOKENS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._memory: WeakKeyDictionary[RequestState, CopiedText] = WeakKeyDictionary()
        self._outcomes: list[CopyOutcome] = []

    @classmethod
    def create(cls, context: DrafterContext) -> NgramDrafter | None:
        """None where nobody asks for it."""
        if cls.name not in context.config.drafter_names:
            return None
        return cls(context.vocab_size)

    def can_draft(self, r: RequestRound) -> bool:
        return self.evidence(r) > 0

    def evidence(self, r: RequestRound) -> int:
        """Tokens that agree before the place that it would copy from, 0 without one."""
        if self.name in r.state.failed_drafters or not r.state.options.compose:
            return 0
        try:
            memory = self._followed(r)
        except Exception:
            # The planner asks, and nobody guards it; a copy is never worth a request.
            logger.exception("PARSE: drafter %s failed for a request", self.name)
            r.state.failed_drafters.add(self.name)
            return 0
        return memory.length if memory.cursor >= 0 else 0

    def take_outcomes(self) -> list[CopyOutcome]:
        """What became of its copies since the last call, drafted or not."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def draft(self, round: Round) -> None:
        for r in round:
            room = r.room(self.name)
            if not room or r.draft.tokens:
                continue
            memory = self._followed(r)
            if memory.cursor < 0:
                continue
            tokens = self._allowed(r, memory.index.copy(memory.cursor, room))
            r.draft = r.draft.extended(self.name, tokens, ended=False, token_level=True)

    def _allowed(self, r: RequestRound, tokens: list[int]) -> list[int]:
        """The tokens up to the first that ends the answer, breaks the grammar, or
        stands for no text."""
        stops, size = r.state.stop_ids, self._vocab_size
        bad = (k for k, t in enumerate(tokens) if t in stops or not 0 <= t < size)
        tokens = tokens[: next(bad, len(tokens))]
        return tokens if r.grammar is None else tokens[: r.grammar.walk(tokens)]

    def _followed(self, r: RequestRound) -> CopiedText:
        """Its memory of a request, along with the tokens decided since."""
        prompt, output, ready = r.req.origin_input_ids, r.req.output_ids, r.state.ready
        memory = self._memory.get(r.state)
        if memory is None:
            memory = self._memory[r.state] = CopiedText(NgramIndex(prompt))
        index = memory.index
        num_known = len(index) - len(prompt)
        new = [*output[num_known:], *ready[max(0, num_known - len(output)) :]]
        if new:
            self._follow(memory, new)
        return memory

    def _follow(self, memory: CopiedText, new: Sequence[int]) -> None:
        """The answer goes on with these tokens: does the copy?"""
        index, num = memory.index, 0
        while memory.cursor >= 0 and num < len(new):
            if index.tokens[memory.cursor] != new[num]:
                self._tell(memory, ended=True)
                memory.near, memory.cursor = memory.cursor, -1
                break
            index.extend((new[num],))
            memory.cursor += 1
            memory.length += 1
            num += 1
        index.extend(new[num:])
        if memory.cursor >= 0:
            self._tell(memory, ended=False)
        elif match := index.find(memory.near):
            memory.cursor = match.cursor
            memory.length = memory.told = match.length

    def _tell(self, memory: CopiedText, *, ended: bool) -> None:
        if ended or memory.length > memory.told:
            self._outcomes.append(CopyOutcome(memory.told, memory.length, ended))
            memory.told = memory.length
