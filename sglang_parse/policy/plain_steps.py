"""How many decode steps a round without drafts takes; pure."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.requests.round_records import Round

# Most decode steps of a round, and their milliseconds together.
MOST_STEPS, MOST_MS = 16, 200.0
# The same of requests with stop strings, which SGLang finds after the round.
STOP_STEPS = 4
# Share of a round's rows that may lie after the ends of answers. A row among many costs
# far less than the work between two rounds.
MOST_WASTE = 1 / 8


def plain_steps(round: Round, *, step_ms: float, context_len: int) -> int:
    """Decode steps of a round without drafts, if no answer ends before its longest
    length and nobody waits. step_ms: of one."""
    if not round.may_repeat:
        return 1
    room = min(context_len - r.seq_len - 1 for r in round)
    most = max(1, min(MOST_STEPS, int(MOST_MS / step_ms), room))
    num_stops = sum(r.has_stop_text for r in round)
    if num_stops > MOST_WASTE * len(round):
        most = min(most, STOP_STEPS)
    left = [r.tokens_left for r in round]
    return next((num for num in range(most, 1, -1) if pays(left, num)), 1)


def pays(lens: Sequence[int], num: int) -> bool:
    """Whether few enough rows of so many steps lie after the ends of answers. lens:
    tokens of each answer up to its end, as far as is known."""
    wasted = sum(max(0, num - own) for own in lens)
    return wasted <= MOST_WASTE * num * len(lens)
