"""An answer with stop strings or expressions ends where it would end if its tokens
came one at a time.

SGLang looks for stops in all tokens of a step at once, in the order in which the
request lists them, and then for stop tokens (schedule_batch.py,
`Req.update_finish_state`). A round of PARSE may be a whole answer, in which the first
stop of the list is seldom the first of the text. SGLang would also look at more text
than it does for single tokens, and find a stop that those miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.sgl.compat.request_changes import ends_at
from sglang_parse.sgl.scheduler_types import RequestParameters, SchedulerRequest


def earliest_stop(
    original: Callable[..., bool], req: SchedulerRequest, new_accepted_len: int = 1
) -> bool:
    """AROUND hook on Req._check_str_based_finish: whether a stop string or expression
    ends the answer before any stop token does.

    SGLang's own check runs after each token of the step. `longest_draft`
    (policy/windows.py) bounds the time that this takes.
    """
    params = req.sampling_params
    if new_accepted_len <= 1 or not _has_stops(params):
        return original(req, new_accepted_len)
    if _holds_none(req, new_accepted_len):
        return False
    tokens = req.output_ids
    with ends_at(req) as show:
        for end in range(len(tokens) - new_accepted_len + 1, len(tokens) + 1):
            show(end)
            if original(req, 1) or req.finished_reason is not None:
                return True  # or an expression has failed, and SGLang ends the request
            if req._check_token_based_finish(tokens[end - 1 : end]):
                show(end)  # SGLang finds this one itself.
                return False
    return False


def _has_stops(params: RequestParameters) -> bool:
    return bool(params.stop_strs or params.stop_regex_strs)


def _holds_none(req: SchedulerRequest, new_accepted_len: int) -> bool:
    """Whether the text of the whole step has no stop string, and so no prefix has one.
    An expression may match a prefix only."""
    params = req.sampling_params
    if params.stop_regex_strs or not _decodes_evenly(req.tokenizer, params.stop_strs):
        return False
    tail = req.tail_str(new_accepted_len)
    return not any(
        text in tail or text in req.decoded_text for text in params.stop_strs
    )


def _decodes_evenly(tokenizer: Any, stop_strs: Any) -> bool:
    """Whether later tokens change nothing of a stop string in the text before them."""
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return not cleans and not any("\ufffd" in text for text in stop_strs)
