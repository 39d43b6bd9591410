"""Grammars that no text satisfies: the request is at fault, and not the server."""

from __future__ import annotations

from typing import Any

from sglang_parse.integration.active import serves_parse
from sglang_parse.integration.ending import refuse
from sglang_parse.requests.refusal import bad_request
from sglang_parse.runtime.protocols import SchedulerRequest

# What SGLang says of it (batch_result_processor.py).
REFUSED = "Grammar accept_token failed"


def blame_grammar(
    result: Any, processor: Any, req: SchedulerRequest, *_: Any, **__: Any
) -> Any:
    """AFTER hook on SchedulerBatchResultProcessor._accept_grammar_tokens and
    ._apply_prefill_grammar: HTTP 400 in place of 500.

    Both end a request whose grammar refuses a token. Each token was drawn from what the
    grammar itself allows, so a refused one means that it allows none.
    """
    told = getattr(req.to_finish, "message", None) or ""
    if told.startswith(REFUSED) and serves_parse():
        refuse(req, bad_request(told_of(len(req.output_ids))))
    return result


def told_of(num_tokens: int) -> str:
    """num_tokens: of the answer, as far as the grammar went."""
    where = f"behind {num_tokens} tokens" if num_tokens else "at the beginning"
    return (
        "The grammar (json_schema, regex, ebnf, structural_tag or response_format) "
        f"allows no token {where}; expected one that a text can satisfy."
    )
