"""What draft phases, passes and plain decode steps take: one table, fitted; pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_parse.requests.round_records import Round

# Share of what was seen that each new time replaces: the latest 50 count most.
SMOOTHING = 0.02
# Times that the guess counts for.
GUESSED = 0.05
# Share of the steps that a pass's fixed time is worth for which requests wait for it,
# since another draft that shares it may be far from complete.
IDLE = 0.5
# Before anything is measured: milliseconds of a decode step of the target, and over it
# a draft step and a row of a pass. Of 32B and 1.7B on an H200.
PLAIN_MS, STEP, ROW = 12.0, 1 / 12, 1 / 256


class Fit:
    """Milliseconds as a sum of parts, each of which has its amount: least squares of
    relative errors, the latest times counting most.

    guess: the parts, in any unit. What times do not tell apart is drawn to it.
    """

    def __init__(self, *guess: float) -> None:
        self.parts = self._guess = np.array(guess)
        self.count = 0
        self._sums = np.zeros(len(self._guess))
        self._squares = np.outer(self._sums, self._sums)

    @property
    def is_known(self) -> bool:
        """Whether two times were seen, as the first may hold a kernel's first use."""
        return self.count > 1

    def known_parts(self, scale: float) -> list[float]:
        """The parts; the guess of so many milliseconds until they are known."""
        return list(self.parts if self.is_known else scale * self._guess)

    def ms(self, *amounts: float) -> float:
        return float(self.parts @ np.array(amounts))

    def add(self, ms: float, *amounts: float) -> None:
        self.count += 1
        row = np.array(amounts) / max(ms, 1e-6)
        self._squares = (1 - SMOOTHING) * self._squares + np.outer(row, row)
        self._sums = (1 - SMOOTHING) * self._sums + row
        # Each part is drawn by as much as it makes of an average time.
        draw = np.diag(self._squares) * GUESSED / min(self.count, 1 / SMOOTHING)
        sums = self._sums + draw * self._scaled(self._guess)
        parts = np.linalg.solve(self._squares + np.diag(draw + 1e-12), sums)
        self.parts = self._scaled(np.maximum(parts, 1e-6 * self._guess))

    def _scaled(self, parts: np.ndarray) -> np.ndarray:
        """The multiple of these parts that fits best."""
        scale = float(parts @ self._sums / (parts @ self._squares @ parts))
        return scale * parts


@dataclass(frozen=True)
class Costs:
    """Milliseconds while `bs` requests run.

    step: of the draft model. fixed: a draft phase and a pass, however few steps and
    rows they have, up to the next draft phase. row: of a pass. read: a token that the
    draft model reads before it drafts. plain: a decode step of the target.
    """

    bs: int
    step: float
    fixed: float
    row: float
    read: float
    plain: float

    @property
    def most_idle_steps(self) -> float:
        """Draft steps that requests wait for their pass, summed over these, until what
        they lose outweighs what they save: their share of a pass's fixed time.

        A request that waits loses its share of a step, so a pass's fixed time is that
        of `bs` times as many steps as fit into it.
        """
        return IDLE * self.bs * self.fixed / self.step

    def pass_ms(self, rows: float) -> float:
        return self.fixed + self.row * rows


class CostModel:
    """What all rounds took."""

    def __init__(self) -> None:
        # A request adds to the time of a step, as its text is read from memory.
        self.draft = Fit(STEP, STEP, STEP * ROW, STEP * ROW)
        self.verify, self.head = Fit(1.0, ROW, ROW), Fit(1.0, ROW, ROW)
        self.plain = Fit(1.0, ROW)
        self._sizes: set[int] = set()

    @property
    def is_known(self) -> bool:
        return self.draft.is_known and self.verify.is_known

    def knows_plain(self, bs: int) -> bool:
        """Whether plain steps of about so many requests were timed."""
        return self.plain.is_known and bs.bit_length() in self._sizes

    def at(self, bs: int) -> Costs:
        plain = self.plain.ms(1, bs) if self.plain.count else PLAIN_MS
        phase, step, shared, read = self.draft.known_parts(plain)
        fixed, row, request = self.verify.known_parts(plain)
        fixed += request * bs
        if self.verify.is_known and not self.plain.count:
            plain = fixed + row * bs
        return Costs(bs, step + shared * bs, phase + fixed, row, read, plain)

    def learn(self, done: Round, *, by_head: bool = False) -> float:
        """Milliseconds of a round. done: of the requests whose drafts were complete.
        by_head: whether a head wrote all their drafts."""
        bs, seconds, steps = done.num_running, done.seconds, done.num_draft_steps
        ms, draft_ms = 1000 * sum(seconds.values()), 1000 * seconds["draft"]
        # A token or so of each request tells nothing of what reading costs.
        read = done.num_read if done.num_read > bs else 0
        if by_head:
            # Meanwhile the draft model may have written for other requests.
            model_ms = self.draft.ms(1, steps, steps * bs, read) if steps else 0.0
            own_ms = ms - min(draft_ms, model_ms)
            self.head.add(own_ms, 1, max(bs, done.num_rows), bs)
        elif "verify" in seconds:
            self.verify.add(ms - draft_ms, 1, done.num_rows, bs)
            if steps and not any(
                r.draft.num_token_level > r.draft.num_copied for r in done
            ):
                self.draft.add(draft_ms, 1, steps, steps * bs, read)
        elif not (steps or done.num_read):
            self.plain.add(ms / done.num_steps, 1, bs)
            if self.plain.is_known:
                self._sizes.add(bs.bit_length())
        return ms
