"""Request -> RequestState: what the worker keeps of every running request."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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

    def of(self, req: Any) -> RequestState:
        """The request's state, a fresh one when it is first seen or was forgotten."""
        state = self._states.get(req)
        if state is None:
            state = self._states[req] = self._new(req)
        return state

    def forget(self, req: Any) -> None:
        """Before a prefill: what was known of a retracted request's KV is void."""
        self._states.pop(req, None)

    def _new(self, req: Any) -> RequestState:
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
        known = report.report_of(req)
        if known is not None:
            known.finish(req.output_ids)  # tokens decided ahead went with the KV
        else:
            served = "verify" if options.verify_only else options.mode
            known = RequestReport(served, options.fallback, options.report)
        known.client = client
        report.attach(req, known)
        return RequestState(
            options=options,
            stop_ids=stop_token_ids(req, self.model_eos_ids),
            judge=judge,
            report=known,
            client=client,
        )
