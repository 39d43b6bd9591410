"""Refusals of ours become errors of SGLang's requests."""

from __future__ import annotations

from http import HTTPStatus

from sglang_parse.requests.refusal import Refusal
from sglang_parse.runtime.compat.requests import abort
from sglang_parse.runtime.protocols import SchedulerRequest

ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


def refuse(req: SchedulerRequest, refusal: Refusal) -> None:
    """End a request with an HTTP error, as SGLang's scheduler does."""
    err_type = ERROR_TYPES[refusal.status]
    abort(req, str(refusal), status=refusal.status, err_type=err_type)
