"""Decisions -> what SGLang gets back: tokens, lengths, logprobs, hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_parse.decide import Decision
from sglang_parse.sampling import ROW_LISTS


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
class SampledRows:
    """Rows at which the target's own token was sampled.

    places: per request, indices of its sampled rows, in order of draft tokens. output:
    logprobs of the sampled tokens, row by row.
    hidden_states: [rows of the pass, hidden]. root_rows: per request.
    """

    places: Sequence[Sequence[int]]
    output: LogitsProcessorOutput
    hidden_states: Tensor | None
    root_rows: Sequence[int]


def build_result(
    decisions: Sequence[Decision],
    *,
    seq_lens: Tensor,
    num_draft_tokens: Sequence[int],
    sampled: SampledRows,
    return_logprob: bool,
    return_hidden_states: bool,
) -> GenerationBatchResult:
    """Pad the accepted tokens to one stride (sglang/srt/managers/utils.py).

    seq_lens: [bs] before the round. accept_lens count the bonus token.
    """
    lens = [len(d.accept_tokens) for d in decisions]
    stride = max(lens)
    tokens = [
        list(d.accept_tokens) + [0] * (stride - len(d.accept_tokens)) for d in decisions
    ]
    accept_lens = torch.tensor(lens, dtype=torch.int32, device=seq_lens.device)
    output = LogitsProcessorOutput(next_token_logits=None)
    if return_logprob:
        _fill_logprobs(output, decisions, sampled, stride)
    if return_hidden_states and sampled.hidden_states is not None:
        # Tokens decided before this pass have no row in it; who asked has none of them.
        last = len(sampled.hidden_states) - 1
        rows = [
            min(root + min(j, n - 1), last)
            for root, n in zip(sampled.root_rows, lens, strict=True)
            for j in range(stride)
        ]
        index = torch.tensor(rows, device=sampled.hidden_states.device)
        output.hidden_states = sampled.hidden_states[index]
    return GenerationBatchResult(
        logits_output=output,
        next_token_ids=torch.tensor(tokens, device=seq_lens.device).flatten(),
        accept_lens=accept_lens,
        cap_lens=torch.tensor(
            num_draft_tokens, dtype=torch.int32, device=seq_lens.device
        ),
        speculative_output_stride=stride,
        new_seq_lens=seq_lens + accept_lens.to(seq_lens.dtype),
        next_draft_input=ParseDraftInput(),
        can_run_cuda_graph=False,
    )


def _fill_logprobs(
    output: LogitsProcessorOutput,
    decisions: Sequence[Decision],
    sampled: SampledRows,
    stride: int,
) -> None:
    """Lay the sampled rows' logprobs out as [bs, stride].

    Requests that asked for logprobs are never judged, so their rows start at the
    round's first token. Source: batch_result_processor.py, `_apply_decode_logprobs`.
    """
    source = sampled.output
    place = []
    for rows, decision in zip(sampled.places, decisions, strict=True):
        num_rows = decision.num_matched + 1
        place += [rows[j if j < num_rows else 0] for j in range(stride)]
    index = torch.tensor(place)
    values = source.next_token_logprobs
    if values is not None:
        chosen = values[index.to(values.device)]
        output.next_token_logprobs = chosen.view(len(decisions), stride)
    for name in ROW_LISTS:
        rows_of: Any = getattr(source, name)
        if rows_of is not None:
            setattr(output, name, [rows_of[i] for i in place])
