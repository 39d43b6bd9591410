"""The target's decode steps in a row, and the one that runs ahead of the next round.

Between two rounds a device would wait for the host. Where the next round will be plain
too, its first step is launched before the host reads what this round gave. A round that
turns out otherwise leaves that step aside, and writes the same KV in its place again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from sglang_parse.requests.round_records import Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.forward_batches import mrope_shifts
from sglang_parse.sgl.readback import StepTokens, mark_end
from sglang_parse.sgl.sampling import wants_more
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.drawing import draw, sampling_state
from sglang_parse.verify.output import PassOutput
from sglang_parse.verify.passes import TargetVerifier

# Called before each step but the first, with the tokens of the steps that are known and
# the number of all: whether there is another one.
GoOn = Callable[[list[list[int]], int], bool]


@dataclass(frozen=True)
class Step:
    """One decode step. tokens: [requests] int64, what it samples, on the device."""

    output: PassOutput
    tokens: Tensor
    sampled: LogitsProcessorOutput


@dataclass(frozen=True)
class StepAhead:
    """The step after a round's last one, and the requests whose next step it is."""

    step: Step
    #: By row, what PARSE remembers of the request; another one if it begins anew.
    states: tuple[ref[RequestState], ...]
    #: By row, the tokens with KV before the step.
    lens: tuple[int, ...]
    #: An event of the device after it, None where the host is the device.
    end: Any = None

    @property
    def is_done(self) -> bool:
        """Whether the device waits already."""
        return self.end is not None and bool(self.end.query())

    def rows_of(self, round: Round) -> list[int | None]:
        """Its row of each request of a round, None where it is not the next step."""
        row_of = {id(state()): row for row, state in enumerate(self.states)}
        rows = [row_of.get(id(r.state)) for r in round]
        return [
            row if row is not None and self.lens[row] == r.seq_len else None
            for row, r in zip(rows, round, strict=True)
        ]


class DecodeSteps:
    """Runs decode steps of one round after another.

    runs_ahead: whether the device computes while the host does something else.
    """

    def __init__(self, verifier: TargetVerifier, *, runs_ahead: bool = False) -> None:
        self.verifier = verifier
        self.runs_ahead = runs_ahead
        self._ahead: StepAhead | None = None
        #: What runs already of the round that was looked at, and its rows.
        self._taken: tuple[StepAhead, list[int | None]] | None = None

    def look(self, round: Round) -> None:
        """Take the step that runs already, if it is any request's of a plain round.

        Fills `took_ahead`, and `num_skipped` of those whose step it is not. They get
        their first token from the step after it, so the round has at least two.
        """
        ahead = self._ahead
        self.forget()
        if ahead is None:
            return
        rows = ahead.rows_of(round)
        num_others = rows.count(None)
        if num_others and not self._may_run_ahead(round):
            return
        if num_others < len(rows):
            self._taken, round.took_ahead = (ahead, rows), True
            round.num_steps = max(round.num_steps, 1 + (num_others > 0))
            for r, row in zip(round, rows, strict=True):
                r.num_skipped = int(row is None)

    def forget(self) -> None:
        """What runs already is not used by any request."""
        self._ahead = self._taken = None

    def run(
        self, round: Round, table: Tensor, go_on: GoOn
    ) -> tuple[list[list[int]], list[LogitsProcessorOutput]]:
        """Tokens and logprobs of up to `num_steps` steps after each bonus token; the
        round's `output` is the last one's.

        The first one may run already (`look`). Between steps the host never waits for
        the one that runs. go_on is also called before the step that runs ahead.
        """
        chain = _Chain(self.verifier, round, table)
        tokens = StepTokens(round.batch.seq_lens.device)
        samples: list[LogitsProcessorOutput] = []
        taken = self._taken
        least = 1 + max(r.num_skipped for r in round)
        self.forget()

        def goes_on() -> bool:
            return len(samples) < least or go_on(tokens.known(), len(samples))

        while len(samples) < round.num_steps and goes_on():
            if taken is not None and not samples:
                ahead, rows = taken
                step, round.is_late = chain.take(ahead.step, rows), ahead.is_done
            else:
                step = chain.run()
            tokens.add(step.tokens)
            samples.append(step.sampled)
            round.output = step.output
        if len(samples) == round.num_steps and self._may_run_ahead(round) and goes_on():
            self._ahead = StepAhead(
                chain.run(),
                states=tuple(ref(r.state) for r in round),
                lens=tuple(r.seq_len + len(samples) - r.num_skipped for r in round),
                end=mark_end(round.batch.seq_lens.device),
            )
        return tokens.all(), samples

    def _may_run_ahead(self, round: Round) -> bool:
        """Not where more than tokens is wanted, nor where a recurrent state would
        have read what the answer may not have."""
        if not (self.runs_ahead and round.goes_on) or round.has_state:
            return False
        return not wants_more(round.batch)


class _Chain:
    """Steps of a round, each of which begins with what the one before it samples."""

    def __init__(self, verifier: TargetVerifier, round: Round, table: Tensor) -> None:
        device = round.batch.seq_lens.device
        self._verifier = verifier
        self._round = round
        self._table = table
        self._info = sampling_state(round, range(len(round)))
        self._shifts = mrope_shifts(round.batch.reqs)
        self._num = 0
        self._host_lens = torch.tensor([r.seq_len for r in round])
        self._lens = upload(self._host_lens, device)
        self._tokens = upload([r.bonus_token for r in round], device)

    def run(self) -> Step:
        round, batch = self._round, self._round.batch
        output = self._verifier.decode(
            input_ids=self._tokens,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=self._lens,
            seq_lens_cpu=self._host_lens,
            table=self._table,
            return_hidden_states=batch.return_hidden_states,
            is_followed=not round.head_rests,
            mrope_shifts=self._shifts,
        )
        tokens, sampled = draw(
            self._verifier.runner,
            round,
            output.logits,
            info=self._info,
            owner=range(len(round)),
            offset=[self._num] * len(round),
            positions=self._lens,
        )
        self._move(tokens)
        return Step(output, tokens, sampled)

    def take(self, step: Step, rows: Sequence[int | None]) -> Step:
        """A step that runs already, at its row of each request. Those without one stay
        where they are."""
        tokens, device = step.tokens, step.tokens.device
        if list(rows) == list(range(len(tokens))):
            self._move(tokens)
            return step
        has_row = torch.tensor([row is not None for row in rows])
        index = torch.tensor([row or 0 for row in rows])
        moves, index = upload(torch.stack([has_row, index]), device)
        tokens = torch.where(moves.bool(), tokens[index], self._tokens)
        self._num += 1
        self._tokens = tokens
        self._lens, self._host_lens = self._lens + moves, self._host_lens + has_row
        return Step(step.output, tokens, step.sampled)

    def _move(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._num += 1
        self._lens, self._host_lens = self._lens + 1, self._host_lens + 1
