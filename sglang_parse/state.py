"""What the worker remembers of a request between rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_parse.judge import JudgePrompt
from sglang_parse.metrics import RequestReport
from sglang_parse.request import RequestOptions


@dataclass
class RequestState:
    """num_cached: leading positions with draft KV, None until looked up.

    pending: drafted tokens that follow the bonus token and await a boundary;
    pending_ended: whether the draft ended the response after them. window: adapted
    window, 0 while unlimited.
    """

    options: RequestOptions
    stop_ids: frozenset[int]
    judge: JudgePrompt | None
    report: RequestReport
    num_cached: int | None = None
    pending: tuple[int, ...] = ()
    pending_ended: bool = False
    window: int = 0

    @property
    def suffix(self) -> tuple[int, ...]:
        """Judge suffix tokens; empty where nothing is judged."""
        return self.judge.suffix if self.judge else ()


@dataclass(frozen=True)
class RoundDraft:
    """One request's draft this round: pending tokens, then newly drafted ones.

    num_new: the latter. num_forwarded: sequence positions with draft KV afterwards,
    0 if the draft model did not run for this request.
    """

    tokens: tuple[int, ...] = ()
    ended: bool = False
    num_new: int = 0
    num_forwarded: int = 0


def stop_token_ids(req: Any, model_eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end this request (schedule_batch.py, `_check_token_based_finish`)."""
    params = req.sampling_params
    if params.ignore_eos:
        return frozenset()
    ids = set(params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= model_eos_ids
    if req.tokenizer is not None:
        ids.add(req.tokenizer.eos_token_id)
        ids |= set(req.tokenizer.additional_stop_token_ids or ())
    return frozenset(i for i in ids if i is not None)
