"""The rolling batch of a draft phase: what each request is drafted, step by step.

No tensor and no model is in sight here; `draft_model.DraftModel` runs the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.grammar import GrammarChain

# Draft steps after which the model looks whether the scheduler has to be asked.
LOOK_STEPS = 8


@dataclass(frozen=True)
class DraftRequest:
    """One request's work order.

    row: its row of req_to_token. tokens: committed tokens, bonus and pending draft.
    num_cached: leading tokens whose draft KV is in the pool, less than len(tokens).
    num_new: tokens to draft. stop_ids: tokens that end the response.
    batch_index: its place in the round's sampling info. grammar: constrains the draft.
    """

    row: int
    tokens: Sequence[int]
    num_cached: int
    num_new: int
    stop_ids: frozenset[int]
    batch_index: int
    grammar: GrammarChain | None = None


@dataclass(frozen=True)
class DraftPhase:
    """When a draft phase ends before all drafts are complete.

    most_steps: draft steps. most_idle: steps that requests wait for their pass, summed
    over these; num_idle: of them wait from the beginning, since nothing is drafted for
    them. most_read: tokens of long texts to read before the first step. is_due: whether
    the scheduler has to be asked, the same on all ranks.
    """

    most_steps: int = 1 << 30
    most_idle: float = math.inf
    num_idle: int = 0
    most_read: int = 1 << 30
    is_due: Callable[[], bool] = lambda: False

    @classmethod
    def of(cls, round: Round, num_drafting: int) -> DraftPhase:
        return cls(
            round.most_draft_steps,
            round.most_idle_steps,
            len(round) - num_drafting,
            round.most_read,
            round.is_due,
        )


class Lane:
    """The draft of one request in a draft phase.

    lead: tokens of its text that the model has not read, at least the last one. They
    are forwarded by the first steps.
    """

    def __init__(self, request: DraftRequest, lead: int) -> None:
        self.request = request
        self.lead = lead
        self.tokens: list[int] = []
        self.ended = self.is_complete = False
        #: Positions from `start` on that have the model's KV.
        self.num_forwarded = 0

    @property
    def start(self) -> int:
        """The position of the first token that is forwarded."""
        return len(self.request.tokens) - self.lead

    @property
    def end(self) -> int:
        """The position of the last one, if the draft becomes as long as it may."""
        return len(self.request.tokens) + self.request.num_new - 2

    def lead_tokens(self, num: int) -> Sequence[int]:
        """The lead, filled up to `num` tokens."""
        tokens = list(self.request.tokens[self.start :])
        return tokens + tokens[-1:] * (num - len(tokens))

    def writes(self, step: int) -> bool:
        """Whether the step, from 1 on, drafts a token of this lane."""
        num = step - self.lead + 1
        return 1 <= num <= self.request.num_new and not self.is_complete

    def is_done(self, num_steps: int) -> bool:
        """Whether it is complete after so many steps, as far as is known."""
        return self.is_complete or num_steps >= self.lead + self.request.num_new - 1

    @property
    def unread(self) -> list[int]:
        """The tokens of the lead and the draft that the model has not read."""
        return self.behind(self.start + self.num_forwarded)

    def behind(self, start: int) -> list[int]:
        """The tokens of the lead and the draft from this position on."""
        at = start - len(self.request.tokens)
        lead = self.request.tokens[start:] if at < 0 else ()
        return [*lead, *self.tokens[max(0, at) :]]

    def follow(self, tokens: list[int], found: list[int], num_guesses: int) -> None:
        """Take what the model wrote behind each of `tokens`, up to a wrong guess."""
        self.num_forwarded += len(tokens) - num_guesses
        for k in range(len(tokens) - num_guesses - 1, len(tokens)):
            self.add(found[k])
            if self.is_complete or tokens[k + 1 : k + 2] != [found[k]]:
                return
            self.num_forwarded += 1

    def add(self, token: int) -> None:
        grammar = self.request.grammar
        if token in self.request.stop_ids:
            self.ended = self.is_complete = True
            return
        if grammar is not None and not grammar.advance(token):
            # A draft ends in front of a token that its grammar refuses.
            self.is_complete = True
            return
        self.tokens.append(token)
        self.is_complete = len(self.tokens) == self.request.num_new


class Lanes(list[Lane]):
    """The rolling batch of a draft phase: a row of each step for each lane."""

    _num_seen = _num_idle = _num_steps = 0

    def see(self, steps: Sequence[Sequence[int]]) -> None:
        """Learn what was drafted. steps: the tokens of all steps that are known."""
        for tokens in steps[self._num_seen :]:
            self._num_seen += 1
            for lane, token in zip(self, tokens, strict=True):
                if lane.writes(self._num_seen):
                    lane.add(token)

    def is_over(self, num_steps: int, num_done: int, phase: DraftPhase) -> bool:
        """Whether the phase ends after so many steps. Asked once after each step.
        num_done: lanes that are complete."""
        before, self._num_steps = self._num_steps, num_steps
        num_idle = num_done + phase.num_idle
        self._num_idle += num_idle * (num_steps - before)
        if num_done == len(self) or num_steps >= phase.most_steps:
            return True
        if num_idle and self._num_idle >= phase.most_idle:
            return True
        looks = num_steps // LOOK_STEPS > before // LOOK_STEPS
        return looks and phase.is_due()
