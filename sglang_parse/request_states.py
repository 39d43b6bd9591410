"""Request -> RequestState: what the worker keeps of every running request."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_parse import report
from sglang_parse.client import ClientText
from sglang_parse.config import ParseConfig
from sglang_parse.judge import JudgePrompt
from sglang_parse.metrics import RequestReport
from sglang_parse.request import RequestOptions
from sglang_parse.state import RequestState, stop_token_ids


@dataclass(frozen=True)
class RequestStates:
    """States of the requests that are alive; SGLang's Req is the key.

    tokenizer: of the target. model_eos_ids: stop tokens of its configuration.
    make_judge: question -> judge suffix. has_draft_model, has_head: what can draft.
    """

    config: ParseConfig
    tokenizer: Any
    model_eos_ids: frozenset[int]
    make_judge: Callable[[str], JudgePrompt]
    has_draft_model: bool
    has_head: bool
    _states: weakref.WeakKeyDictionary[Any, RequestState] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _in_trouble: weakref.WeakKeyDictionary[Any, tuple[int, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def of(self, req: Any) -> RequestState:
        """The request's state, a fresh one when it is first seen or was forgotten."""
        state = self._states.get(req)
        if state is None:
            state = self._states[req] = self._new(req)
        return state

    def forget(self, req: Any) -> None:
        """Before a prefill: what was known of a retracted request's KV is void, but not
        what the target is still to write itself, nor where a verdict failed."""
        state = self._states.pop(req, None)
        if state is not None and (state.recovering or state.num_suspect):
            num_lost = len(state.ready) if state.num_suspect else 0
            self._in_trouble[req] = state.recovering, state.num_suspect + num_lost

    def _new(self, req: Any) -> RequestState:
        try:
            options, judge, client = self._served(req)
        except ValueError as e:
            # No client may stop the scheduler, whatever let its request pass.
            refuse(req, str(e))
            req.sampling_params.custom_params = {"parse_mode": "off"}
            options, judge, client = self._served(req)
        known = report.report_of(req)
        if known is not None:
            known.finish(req.output_ids)  # tokens decided ahead went with the KV
        else:
            served = "verify" if options.verify_only else options.mode
            known = RequestReport(served, options.fallback, options.report)
        known.client = client
        report.attach(req, known)
        recovering, num_suspect = self._in_trouble.pop(req, (0, 0))
        return RequestState(
            options=options,
            stop_ids=stop_token_ids(req, self.model_eos_ids),
            judge=judge,
            report=known,
            client=client,
            recovering=recovering,
            num_suspect=num_suspect,
        )

    def _served(
        self, req: Any
    ) -> tuple[RequestOptions, JudgePrompt | None, ClientText | None]:
        """Raises ValueError on options that nobody checked, a question that the chat
        template changes, and a text that cannot follow the prompt."""
        options = RequestOptions.of(
            req,
            self.config,
            has_draft_model=self.has_draft_model,
            has_head=self.has_head,
        )
        judge = client = None
        if options.mode == "semantic":
            judge = self.make_judge(options.judge_suffix)
        if options.client_text and options.mode != "off":
            client = ClientText.of(options.client_text, self.tokenizer)
            if req.input_embeds is not None:
                raise ValueError(
                    "custom_params has a text behind the prompt's tokens, and the "
                    "prompt came as input_embeds; send it as text or input_ids."
                )
            if options.verify_only and getattr(req, "session", None) is not None:
                raise ValueError(
                    "custom_params.parse_verify generates nothing that a session could "
                    "go on from; send it without session_params."
                )
            if not client.tokens:
                raise ValueError(
                    "custom_params has a text without tokens under this model's "
                    "tokenizer; leave it out."
                )
        return options, judge, client


def refuse(req: Any, message: str) -> None:
    """End a request with HTTP 400, as SGLang's scheduler does."""
    req.to_finish = FINISH_ABORT(
        message, status_code=HTTPStatus.BAD_REQUEST, err_type="BadRequestError"
    )


def turn_away(req: Any, message: str) -> None:
    """End a request with HTTP 503: another time it could be served."""
    req.to_finish = FINISH_ABORT(
        message,
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
        err_type="ServiceUnavailableError",
    )
