"""How a request ends with an error, and what is logged if the server ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sglang_parse.requests.refusal import Refusal
from sglang_parse.sgl.compat.request_changes import abort
from sglang_parse.sgl.scheduler_types import SchedulerRequest

logger = logging.getLogger(__name__)

ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}
# Of the ids in a log line: clients choose them, and batches may be large.
MAX_IDS, MAX_CHARS = 32, 64


def refuse(req: SchedulerRequest, refusal: Refusal) -> None:
    """End a request with an HTTP error, as SGLang's scheduler does."""
    err_type = ERROR_TYPES[refusal.status]
    abort(req, str(refusal), status=refusal.status, err_type=err_type)


@contextmanager
def last_words(reqs: Sequence[Any], kind: str) -> Iterator[None]:
    """Log the requests of a step in one line if the block raises. SGLang then logs the
    traceback and ends the server (scheduler.py, `run_scheduler_process`).

    reqs: SGLang's Reqs. kind: what the step is, for the line.
    """
    try:
        yield
    except Exception as e:
        ids = [ascii(str(req.rid)[:MAX_CHARS]) for req in reqs[:MAX_IDS]]
        logger.critical(
            "PARSE cannot go on: a %s of %d request(s) raised %s; ids %s%s",
            kind,
            len(reqs),
            type(e).__name__,
            ", ".join(ids),
            ", ..." if len(reqs) > MAX_IDS else "",
        )
        raise
