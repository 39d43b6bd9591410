"""Where an answer ends that holds several stops: at the first, as token by token.

SGLang looks for stop strings and expressions in all tokens of a step at once, in the
order in which the request lists them, and for stop tokens behind them
(schedule_batch.py, `Req.update_finish_state`). A round of PARSE may be a whole answer:
the first in the list is then seldom the first in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_parse.integration.active import serves_parse
from sglang_parse.runtime.protocols import SchedulerRequest

# From so many new tokens on, the end of a stop string is looked for by halves.
LEAST_HALVED = 64


def earliest_stop(
    original: Callable[..., bool], req: SchedulerRequest, new_accepted_len: int = 1
) -> bool:
    """AROUND hook on Req._check_str_based_finish: whether the request has ended.

    Where a step of several tokens holds a stop string or expression, the end moves to
    the first one of the step, or to a stop token before it.
    """
    if not original(req, new_accepted_len):
        return False
    if not serves_parse() or new_accepted_len <= 1 or req.finished_len is None:
        return True
    from sglang.srt.managers.schedule_batch import (
        FINISH_MATCHED_STR,
        FINISHED_MATCHED_REGEX,
    )

    params, tail = req.sampling_params, req.tail_str(new_accepted_len)
    found = [(req.finished_len, req.finished_reason)]
    for text in params.stop_strs:
        if text in tail:
            end = req._locate_str_stop_finished_len(new_accepted_len, stop_str=text)
            assert end is not None, text  # it is in the tail
            found.append((end, FINISH_MATCHED_STR(matched=text)))
    for pattern in params.stop_regex_strs:
        try:
            in_tail = re.search(pattern, tail) is not None
            end = req._locate_str_stop_finished_len(
                new_accepted_len, stop_regex=pattern, full_window_matched=in_tail
            )
        except (re.error, RecursionError):
            continue  # SGLang refuses it when its turn comes
        if end is not None:
            found.append((end, FINISHED_MATCHED_REGEX(matched=pattern)))
    end, reason = min(found, key=lambda one: one[0])  # of equals the first
    # A stop token before the end; on the same token the string counts.
    has_token = req._check_token_based_finish(req.output_ids[-new_accepted_len:])
    if not has_token or req.finished_len >= end:
        req.finished_len, req.finished_reason = end, reason
    return True


def locate_stop(
    original: Callable[..., int | None],
    req: SchedulerRequest,
    new_accepted_len: int,
    *,
    stop_str: str | None = None,
    **more: Any,
) -> int | None:
    """AROUND hook on Req._locate_str_stop_finished_len: the tokens up to a stop string
    that the step is known to hold.

    SGLang decodes every prefix of the step, which takes a second for 6,000 tokens. What
    a prefix holds the longer ones hold too, so halving finds the same end.
    """
    halves = stop_str is not None and new_accepted_len >= LEAST_HALVED
    if not halves or not serves_parse() or not _decodes_evenly(req.tokenizer, stop_str):
        return original(req, new_accepted_len, stop_str=stop_str, **more)
    assert stop_str is not None
    start = len(req.output_ids) - req._stop_match_tail_len(new_accepted_len)
    window = req.output_ids[start:]
    low, high = max(1, len(window) - new_accepted_len + 1), len(window)
    while low < high:
        middle = (low + high) // 2
        if stop_str in req.tokenizer.decode(window[:middle]):
            high = middle
        else:
            low = middle + 1
    return start + low


def _decodes_evenly(tokenizer: Any, stop_str: str | None) -> bool:
    """Whether later tokens change nothing of a stop string in the text before them."""
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return not cleans and "\ufffd" not in (stop_str or "")
