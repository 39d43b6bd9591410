"""What is said of a step that nobody survives: whose requests were in it.

SGLang's scheduler logs the traceback of what a step raises and ends the server
(scheduler.py, `run_scheduler_process`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

# Ids come from clients, and batches may be large.
MAX_IDS, MAX_CHARS = 32, 64


@contextmanager
def last_words(reqs: Sequence[Any], kind: str) -> Iterator[None]:
    """Name the requests of a step in one line if the block raises.

    reqs: SGLang's Reqs. kind: what the step is, for the line.
    """
    try:
        yield
    except Exception as e:
        logger.critical(
            "PARSE cannot go on: a %s of %d request(s) raised %s; ids %s",
            kind,
            len(reqs),
            type(e).__name__,
            ids_of(reqs),
        )
        raise


def ids_of(reqs: Sequence[Any]) -> str:
    """The ids of requests on one line, the first of many."""
    ids = [ascii(str(req.rid)[:MAX_CHARS]) for req in reqs[:MAX_IDS]]
    return ", ".join(ids) + (", ..." if len(reqs) > MAX_IDS else "")
