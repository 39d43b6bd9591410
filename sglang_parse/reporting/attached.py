"""The report of each running request, for those who write it and those who send it.

The worker and SGLang's output streamer live in one scheduler process.
"""

from __future__ import annotations

import weakref
from typing import Any

from sglang_parse.reporting.report import RequestReport

_reports: weakref.WeakKeyDictionary[Any, RequestReport] = weakref.WeakKeyDictionary()


def attach(req: Any, report: RequestReport) -> None:
    """Make `report` the report of `req` (SGLang's Req)."""
    _reports[req] = report


def report_of(req: Any) -> RequestReport | None:
    return _reports.get(req)
