"""A request that ends with an error, as the engine sees it; SGLang ends it."""

from __future__ import annotations

from http import HTTPStatus


class Refusal(Exception):
    """Ends one request. status: the HTTP status; the text is one sentence for its
    sender."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def bad_request(message: str) -> Refusal:
    """HTTP 400: it can never be served as it is."""
    return Refusal(HTTPStatus.BAD_REQUEST, message)


def try_again(message: str) -> Refusal:
    """HTTP 503: another time it could be served."""
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE, f"{message}; send the request again later."
    )


def cannot_judge(reason: str) -> Refusal:
    """HTTP 500: a text that is judged alone gets no verdicts. reason: a clause."""
    return Refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"custom_params.parse_verify cannot be judged, because {reason}; the server's "
        "log has the traceback.",
    )


def internal_error(error: Exception) -> Refusal:
    """HTTP 500: our own fault; the log has the traceback."""
    return Refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"PARSE failed on this request ({type(error).__name__}); the server's log has "
        "the traceback.",
    )
