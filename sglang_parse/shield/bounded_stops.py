"""Stop expressions of clients, each searched for in bounded time.

SGLang searches with Python's `re` in the scheduler, after each token. Its time may grow
exponentially with the text, and all requests wait for it. `regex` reads the same
expressions and has a timeout, which counts processor time.
"""

from __future__ import annotations

import math
import re
import time
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
        #: Whose answer is searched, and seconds so far by request.
        self.req: Any = None
        self.spent: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        #: Expressions that this step has searched the whole text for.
        self.seen: set[str] = set()

    def begin(self, req: Any) -> None:
        self.req = req
        self.seen.clear()

    def search(self, expression: str, text: str) -> Any:
        """Raises re.error where the time is up, and SGLang ends the request with HTTP
        400. It does so in a step's first search alone, so others find nothing."""
        is_first = expression not in self.seen
        self.seen.add(expression)
        found = None if self._is_late() else self._search(expression, text)
        if is_first and self._is_late():
            raise re.error(TOO_LONG)
        return found

    def ends(self, req: Any, expression: str, text: str) -> bool:
        """Whether the expression ends an answer behind `text`; it does where time is
        up, and SGLang's own search ends the request."""
        self.req = req
        is_late = self._is_late()
        return is_late or self._search(expression, text) is not None or self._is_late()

    def _search(self, expression: str, text: str) -> Any:
        started = time.thread_time()
        try:
            return regex.search(expression, text, timeout=SEARCH_S)
        except (regex.error, TimeoutError):
            started = -math.inf
            return None
        finally:
            seconds = time.thread_time() - started
            self.spent[self.req] = self.spent.get(self.req, 0.0) + seconds

    def _is_late(self) -> bool:
        allowed = ANSWER_S + TOKEN_S * len(self.req.output_ids)
        return self.spent.get(self.req, 0.0) > allowed


SEARCH = BoundedSearch()


def bound_search(req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on Req._check_str_based_finish."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.runtime_context import get_server_args

    if req.sampling_params.stop_regex_strs and is_shielded(get_server_args()):
        schedule_batch.re = SEARCH  # type: ignore[assignment]
        SEARCH.begin(req)
