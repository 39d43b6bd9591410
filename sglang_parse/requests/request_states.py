"""Request -> RequestState: what the worker keeps of every running request."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options.request import RequestOptions, check_custom_params
from sglang_parse.options.server import ParseConfig
from sglang_parse.reporting.report import RequestReport, attach, report_of
from sglang_parse.requests.client_text import ClientText
from sglang_parse.requests.refusal import (
    Refusal,
    bad_request,
    internal_error,
    try_again,
)
from sglang_parse.requests.state import RequestState, stop_token_ids
from sglang_parse.sgl.compat.request_changes import serve_plainly

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestStates:
    """States of the requests that are alive; SGLang's Req is the key."""

    config: ParseConfig
    #: Of the target.
    tokenizer: Any
    #: Stop tokens of the target's configuration.
    model_eos_ids: frozenset[int]
    #: Question -> judge suffix.
    make_judge: Callable[[str], JudgePrompt]
    #: What can draft: what is judged, such as a draft model, and what writes tokens
    #: that must equal the target's, such as a head of the target.
    has_draft_model: bool
    has_token_level: bool
    #: Ends a request with an error.
    refuse: Callable[[Any, Refusal], None]
    #: What gives a request's verdicts. Raises ValueError where that is not served.
    judge_kind: Callable[[RequestOptions], str] = lambda options: "suffix"
    #: Why the target can judge nothing, as reports say it, or "".
    no_verdicts: str = ""
    _states: weakref.WeakKeyDictionary[Any, RequestState] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _in_trouble: weakref.WeakKeyDictionary[Any, tuple[int, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def count(self) -> int:
        """How many there are: at rest those of the last batches at most."""
        return len(self._states)

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
            # Again, whatever carried them here.
            check_custom_params(req.sampling_params.custom_params, config=self.config)
            options, judge, client = self._served(req)
            kind = self.judge_kind(options)
        except Exception as e:
            # No client may stop the scheduler, whatever let its request pass.
            self.refuse(req, _refusal_of(e, req))
            serve_plainly(req)
            options, judge, client = self._served(req)
            kind = "suffix"
        if options.verify_only and req.output_ids:
            # Its slots went to other requests between two of its passes.
            lost = "custom_params.parse_verify lost its place to other requests"
            self.refuse(req, try_again(lost))
        known = report_of(req)
        if known is not None:
            known.finish(req.output_ids)  # tokens decided ahead went with the KV
        else:
            served = "verify" if options.verify_only else options.mode
            known = RequestReport(
                served,
                options.fallback,
                options.report,
                judge=self.config.judge if judge is not None else "",
            )
        known.client = client
        attach(req, known)
        recovering, num_suspect = self._in_trouble.pop(req, (0, 0))
        return RequestState(
            options=options,
            stop_ids=stop_token_ids(req, self.model_eos_ids),
            judge=judge,
            report=known,
            judge_kind=kind,
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
            has_token_level=self.has_token_level,
            no_verdicts=self.no_verdicts,
        )
        judge = client = None
        if options.mode == "semantic":
            judge = self.make_judge(options.judge_suffix)
        if options.client_text and options.mode != "off":
            if options.verify_only:
                # Judged whole, and as text: what looks like a turn's end is none.
                client = ClientText.of(
                    options.client_text, self.tokenizer, is_plain=True
                )
            else:
                stop_ids = stop_token_ids(req, self.model_eos_ids)
                client = ClientText.of(options.client_text, self.tokenizer, stop_ids)
            if req.input_embeds is not None:
                raise ValueError(
                    "custom_params has a text behind the prompt's tokens, and the "
                    "prompt came as input_embeds; send it as text or input_ids."
                )
            if getattr(req, "multimodal_inputs", None) is not None:
                raise ValueError(
                    "custom_params has a text behind the prompt's tokens, and the "
                    "prompt has images; send the text or the images alone."
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


def _refusal_of(error: Exception, req: Any) -> Refusal:
    """A ValueError tells the client what is wrong; anything else is our own fault."""
    if isinstance(error, ValueError):
        return bad_request(str(error))
    logger.error("PARSE: request %.64r failed", req.rid, exc_info=error)
    return internal_error(error)
