"""Decisions -> what SGLang gets back: tokens, lengths, logprobs, hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_parse.plugin.stops import num_kept
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.sampling import ROW_LISTS
from sglang_parse.sgl.scheduler_types import SchedulerRequest
from sglang_parse.sgl.upload import upload


class ParseDraftInput(SpecInput):
    """What travels from one round to the next: nothing.

    The pending token is `req.output_ids[-1]` (rounds run without overlap) and all
    else is kept by the worker per request.
    """

    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)

    def filter_batch(
        self, new_indices: Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        return None

    def merge_batch(self, other: SpecInput) -> None:
        return None


@dataclass(frozen=True)
class Emitted:
    """What one request of a batch gets from a step."""

    #: Tokens decided ahead come first. Empty where it waits or has failed.
    tokens: tuple[int, ...] = ()
    #: Tokens that were drafted for it.
    num_drafted: int = 0
    #: How many of the tokens each pass of the target gave.
    passes: tuple[int, ...] = ()
    #: Its record, None where it took no part in the round.
    r: RequestRound | None = None


def emit(rounds: Sequence[RequestRound]) -> Emitted:
    """The tokens of a request's passes in one quantum, up to the end of its answer.
    Those that were decided ahead of the first one were drafted once."""
    last = rounds[-1]
    tokens, last.state.ready = last.state.ready, ()
    passes = [num for r in rounds for num in _tokens_by_pass(r)]
    num_ahead = len(tokens) - sum(passes)
    if passes:
        passes[0] += num_ahead
    num_drafted = num_ahead + sum(len(r.draft.tokens) for r in rounds)
    num = num_kept(last.req, tokens, last.state.stop_ids)
    return Emitted(tokens[:num], num_drafted, tuple(_first(passes, num)), last)


def emit_ready(req: SchedulerRequest, state: RequestState) -> Emitted:
    """What was decided ahead, for a request that took part in no pass since."""
    tokens, state.ready = state.ready, ()
    tokens = tokens[: num_kept(req, tokens, state.stop_ids)]
    return Emitted(tokens, len(tokens), (len(tokens),))


def _first(passes: Iterable[int], num: int) -> Iterator[int]:
    """The passes that gave the first `num` tokens, and how many of them each gave."""
    for gave in passes:
        yield min(gave, num)
        num -= gave
        if num <= 0:
            return


def _tokens_by_pass(r: RequestRound) -> list[int]:
    """What each pass of one round gave: a decode step gives one."""
    num = len(r.decision.accept_tokens)
    return [num] if r.draft.tokens else [1] * num


@dataclass
class HostResult(GenerationBatchResult):
    """A result that the host has already: SGLang does not copy it from the device."""

    #: [bs] int64, tokens with KV behind the round, on the device and on the host. They
    #: stand for `new_seq_lens` (scheduler_hooks.py).
    lens: Tensor | None = None
    host_lens: Tensor | None = None
    #: Passes of all requests, beside the one of each that SGLang counts.
    num_more_passes: int = 0

    def copy_to_cpu(
        self, return_logprob: bool, return_hidden_states: bool = True
    ) -> None:
        """Only what the requests asked for besides has to be copied."""
        if return_logprob or return_hidden_states:
            super().copy_to_cpu(return_logprob, return_hidden_states)
        else:
            self.copy_done = None


def build_result(
    emitted: Sequence[Emitted],
    round: Round | None,
    *,
    seq_lens: Tensor,
    host_lens: Tensor,
    return_logprob: bool,
    return_hidden_states: bool,
) -> HostResult:
    """Pad the tokens to one stride (sglang/srt/managers/utils.py).

    round: of the requests of the last pass, None without one. seq_lens, host_lens: [bs]
    before the round, on the device and on the host.
    """
    lens = [len(one.tokens) for one in emitted]
    stride = max(1, *lens)
    tokens = [[*one.tokens, *[0] * (stride - len(one.tokens))] for one in emitted]
    num_new = torch.tensor(lens)
    num_drafted = [one.num_drafted for one in emitted]
    output = LogitsProcessorOutput(next_token_logits=None)
    if return_logprob:
        output.next_token_logprobs = torch.zeros(len(emitted), 1)  # of no token
    if round is not None and return_logprob:
        _fill_logprobs(output, emitted, round)
    if round is not None and return_hidden_states:
        _fill_hidden_states(output, emitted, round, stride)
    return HostResult(
        logits_output=output,
        next_token_ids=torch.tensor(tokens).flatten(),
        accept_lens=num_new.to(torch.int32),
        cap_lens=torch.tensor(num_drafted, dtype=torch.int32),
        speculative_output_stride=stride,
        lens=seq_lens + upload(num_new, seq_lens.device),
        host_lens=host_lens + num_new,
        num_more_passes=sum(max(0, len(one.passes) - 1) for one in emitted),
        next_draft_input=ParseDraftInput(),
        can_run_cuda_graph=False,
    )


def _fill_hidden_states(
    output: LogitsProcessorOutput,
    emitted: Sequence[Emitted],
    round: Round,
    stride: int,
) -> None:
    """[bs * stride, hidden]. Tokens decided before this pass have no row in it; a
    request that asked for hidden states has none of them."""
    source = round.output.hidden_states
    if source is None:
        return
    last = len(source) - 1
    rows = []
    for one in emitted:
        most = max(0, len(one.tokens) - 1)
        own = [one.r.root_row + min(j, most) if one.r else 0 for j in range(stride)]
        rows += [min(row, last) for row in own]
    output.hidden_states = source[upload(rows, source.device)]


def _fill_logprobs(
    output: LogitsProcessorOutput,
    emitted: Sequence[Emitted],
    round: Round,
) -> None:
    """Lay the sampled rows' logprobs out as [bs, width].

    SGLang reads the width from the rows, of requests that asked alone; a long text of
    another request does not widen them. Those that asked are never judged, so their
    rows start at the round's first token. Source: batch_result_processor.py,
    `_apply_decode_logprobs`.
    """
    asking = (one for one in emitted if one.r and one.r.req.return_logprob)
    width = max((1, *(len(one.tokens) for one in asking)))
    source = round.sampled
    place: list[int] = []
    for one in emitted:
        rows = one.r.kept.places if one.r else [0]
        num_rows = _num_sampled(one.r) if one.r else 1
        place += [rows[j if j < num_rows else 0] for j in range(width)]
    values = source.next_token_logprobs
    if values is not None:
        chosen = values[upload(place, values.device)]
        output.next_token_logprobs = chosen.view(len(emitted), width)
    for name in ROW_LISTS:
        rows_of: Any = getattr(source, name)
        if rows_of is not None:
            setattr(output, name, [rows_of[i] for i in place])


def _num_sampled(r: RequestRound) -> int:
    """How many of its tokens, the first ones, have a sampled row of their own."""
    if not r.draft.tokens:
        return len(r.kept.places)
    return r.decision.num_matched + 1
