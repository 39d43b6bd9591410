"""When the next round with drafts runs before the scheduler is asked again; pure.

Between two rounds the scheduler plans and a device waits. Rounds in a row share that
wait. They end where the scheduler has something to do. Decode steps in a row are in
plain_steps.py.
"""

from __future__ import annotations

from sglang_parse.requests.round_records import Round

# Milliseconds of rounds in a row, if the next one takes as long as the last: so long a
# stream gets no token. A new request ends them.
MOST_MS = 100.0
# Slots that have to be free, in so many rounds like the last one.
ROOM_ROUNDS = 2


def may_go_on(round: Round) -> bool:
    """Whether the next round needs nothing that the scheduler does behind this one.

    It ends answers, finds stop strings, lets requests in that wait, moves grammars on
    and keeps states of recurrent targets. Decode steps follow each other in one round.
    """
    if not (round.is_drafted and round.may_repeat) or round.has_state:
        return False
    if round.num_waiting:
        return False
    return not any(r.error or r.has_stop_text or r.is_at_its_end for r in round)


def has_room(round: Round, num_free: int) -> bool:
    """Whether the next round is not short of slots, which the scheduler would make."""
    return num_free >= ROOM_ROUNDS * sum(r.num_columns for r in round)


def has_time(seconds: float, last: float) -> bool:
    """Whether there is time for one more. seconds: of all rounds in the row. last: of
    the last one."""
    return 1000 * (seconds + last) <= MOST_MS
