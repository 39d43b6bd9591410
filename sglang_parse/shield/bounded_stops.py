"""Stop expressions of clients, each searched for in bounded time.

SGLang searches with Python's `re` in the scheduler, after each token. Its time may grow
exponentially with the text, and all requests wait for it. `regex` reads the same
expressions and has a timeout, which counts processor time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

import regex

from sglang_parse.shield.seams import is_shielded

# One search may take the first, and all of an answer the second and the third together.
SEARCH_S, ANSWER_S, TOKEN_S = 0.1, 2.0, 0.005
TOO_LONG = "it takes too long; expected no repetitions inside of repetitions"


class BoundedSearch:
    """Stands for the module `re` in SGLang's schedule_batch.py, which uses no more."""

    error = re.error

    def __init__(self) -> None:
        #: Whose answer is searched, and the seconds so far by request.
        self.req: Any = None
        self._spent: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    def search(self, expression: str, text: str) -> Any:
        """Raises re.error where the time is up. SGLang ends the request with HTTP 400
        then."""
        started = time.thread_time()
        try:
            found = regex.search(expression, text, timeout=SEARCH_S)
        except (regex.error, TimeoutError) as e:
            raise re.error(TOO_LONG) from e
        spent = self._spent.get(self.req, 0.0) + time.thread_time() - started
        self._spent[self.req] = spent
        if spent > ANSWER_S + TOKEN_S * len(self.req.output_ids):
            raise re.error(TOO_LONG)
        return found


_search = BoundedSearch()


def bounded_stops(
    original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on Req.update_finish_state."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.runtime_context import get_server_args

    params = req.sampling_params
    if not params.stop_regex_strs or not is_shielded(get_server_args()):
        return original(req, *args, **kwargs)
    schedule_batch.re = _search  # type: ignore[assignment]
    _search.req = req
    try:
        return original(req, *args, **kwargs)
    except re.error as e:  # of a step with several tokens, where SGLang has no guard
        told = f"invalid stop_regex {params.stop_regex_strs}: {e}"
        req.finished_reason = schedule_batch.FINISH_ABORT(
            told, HTTPStatus.BAD_REQUEST, "BadRequestError"
        )
    finally:
        schedule_batch.re = re
