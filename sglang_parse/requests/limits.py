"""How many draft tokens a request may have: what is left of its response, its grammar
and stops, and the free KV slots. How many pay is the policy's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from sglang_parse.requests.round_records import RequestRound
from sglang_parse.sgl.scheduler_types import SchedulerRequest

MIN_WINDOW = 8
# Behind each token of a round its last tokens are decoded, as many as a stop of the
# request may have, and searched for each stop expression (plugin/stops.py). What
# has no longest match is searched in the whole answer.
MAX_STOP_CHECKS = 256
MAX_STOP_TOKENS = 1 << 15
# A draft under a grammar is rewound, and xgrammar keeps only so many steps to go back
# (constrained/xgrammar_backend.py, MAX_ROLLBACK_TOKENS is 200).
MAX_GRAMMAR_WINDOW = 64


def draft_window(asked: int, *, num_remaining: int, num_positions: int) -> int:
    """Draft tokens a request may hold; the bonus token takes the last output place.

    asked: the window setting, 0 for the whole response. num_remaining: output tokens
    left. num_positions: positions left for draft tokens and a suffix behind them.
    """
    return max(0, min(asked or num_remaining, num_remaining - 1, num_positions))


def longest_draft(req: SchedulerRequest) -> int:
    """Draft tokens of a round that the request's grammar and stops allow."""
    most = MAX_GRAMMAR_WINDOW if req.grammar else 1 << 30
    params = req.sampling_params
    num = len(params.stop_regex_strs or ())
    longest = params.stop_regex_max_len if num else 0
    if params.stop_strs:
        longest = max(longest, params.stop_str_max_len)
    if not longest:
        return most
    allowed = MAX_STOP_TOKENS // (longest + 1) // max(1, num)
    return min(most, max(MIN_WINDOW, MAX_STOP_CHECKS // max(1, num), allowed))


def longest_window(r: RequestRound, context_len: int) -> int:
    """Draft tokens that this request may hold in this round.

    context_len: of the target, in tokens.
    """
    state = r.state
    if state.options.mode == "off" or state.is_ending:
        return 0
    window = draft_window(
        state.options.window,
        num_remaining=r.req.sampling_params.max_new_tokens - r.output_len,
        num_positions=context_len - r.seq_len - 1 - len(state.suffix),
    )
    head = state.options.exact_head - r.output_len
    if head > 0 and state.options.mode == "semantic":
        # No verdict counts in it, and what is drafted behind a head that the target
        # writes otherwise is lost.
        window = min(window, head)
    return min(window, longest_draft(r.req))


def fit_windows(
    windows: Sequence[int],
    *,
    seq_lens: Sequence[int],
    held: Sequence[int],
    room: int,
    max_rows: int,
) -> list[int]:
    """Shrink windows until their slots fit the pool and their rows one pass, the
    longest first.

    held: slots each row has already. room: free slots, and max_rows: rows of a pass, of
    which a quarter is left for judge suffixes.
    """
    room, max_rows = room * 3 // 4, max_rows * 3 // 4

    def fits(cap: int) -> bool:
        rows = [min(w, cap) for w in windows]
        missing = (
            max(0, n + 1 + w - h) for w, n, h in zip(rows, seq_lens, held, strict=True)
        )
        return sum(missing) <= room and sum(rows) <= max_rows

    caps = range(1, max(windows, default=0) + 1)
    low = bisect_left(caps, True, key=lambda cap: not fits(cap))
    return [min(w, low) for w in windows]
