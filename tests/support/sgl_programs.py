"""SGLang programs waited for without its races.

`state.sync()` and `state.error()` join a queue: where the program fails meanwhile they
may come back before its error is noted, or never (sglang/lang/interpreter.py,
`_thread_worker_func`). `state[name]` raises KeyError where a streamed program has not
come to that call yet.
"""

from typing import Any

TIMEOUT_S = 300


def ended(state: Any) -> Any:
    """The state, its program at its end or failed."""
    worker = state.stream_executor.worker
    worker.join(TIMEOUT_S)
    assert not worker.is_alive(), "the program is still running"
    return state


def error_of(state: Any) -> Exception | None:
    """Why the program failed, None if it did not."""
    error: Exception | None = ended(state).stream_executor.error_
    return error
