"""How many tokens the target writes in a round in which nobody drafts; pure.

Between two rounds the scheduler plans, and a round begins and ends. Where a decode step
is short, that takes a good part of the time. Several steps in a row share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_parse.requests.round_records import Round

# Most steps of a round, and their milliseconds together: so long a stream waits.
MOST_STEPS, MOST_MS = 16, 200.0
# The same of the first rounds, which tell what a step costs; and of requests with stop
# strings, which SGLang finds behind the round.
FIRST_STEPS = STOP_STEPS = 4
# Share of a round's rows that may be behind the ends of answers. A row among many costs
# far less than the work between two rounds.
MOST_WASTE = 1 / 8
# Milliseconds of a step from which on somebody who comes ends a round.
LOOK_UP_MS = 5.0
# Rounds in time after which they get shorter, where a step runs ahead of each.
IN_TIME = 4


def plain_steps(round: Round, *, step_ms: float, context_len: int) -> int:
    """Decode steps of a round without drafts, if no answer ends before its longest
    length and nobody waits. step_ms: of one, 0 while unknown."""
    if not (round.may_repeat and step_ms):
        return 1
    room = min(context_len - r.seq_len - 1 for r in round)
    most = min(most_steps(step_ms), room)
    num_stops = sum(r.has_stop_text for r in round)
    if num_stops > MOST_WASTE * len(round):
        most = min(most, STOP_STEPS)
    left = [r.tokens_left for r in round]
    return next((num for num in range(most, 1, -1) if pays(left, num)), 1)


def most_steps(step_ms: float) -> int:
    """Steps of a round, where nothing else bounds them."""
    return max(1, min(MOST_STEPS, int(MOST_MS / max(1e-9, step_ms))))


def pays(lens: Sequence[int], num: int) -> bool:
    """Whether few enough rows of so many steps stand behind the ends of answers. lens:
    tokens of each answer up to its end, as far as is known."""
    wasted = sum(max(0, num - own) for own in lens)
    return wasted <= MOST_WASTE * num * len(lens)


class AheadPace:
    """Steps of rounds whose first one ran ahead: as few as keep the device busy.

    A round that comes late, when its first step is done, has lost time. The next ones
    are twice as long then, so that it is lost half as often.
    """

    def __init__(self) -> None:
        #: By the logarithm of the number of requests: steps, and rounds in time.
        self._seen: dict[int, tuple[int, int]] = {}

    def most(self, bs: int) -> int:
        """Steps of a round of so many requests, at most."""
        return self._seen.get(_size(bs), (MOST_STEPS, 0))[0]

    def learn(self, bs: int, *, is_late: bool) -> None:
        steps, in_time = self._seen.get(_size(bs), (MOST_STEPS, 0))
        if is_late:
            self._seen[_size(bs)] = min(2 * steps, MOST_STEPS), 0
        elif in_time + 1 < IN_TIME:
            self._seen[_size(bs)] = steps, in_time + 1
        else:
            self._seen[_size(bs)] = max(1, steps - 1), 0


def _size(bs: int) -> int:
    return round(math.log2(bs))
