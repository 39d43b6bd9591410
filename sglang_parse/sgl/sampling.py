"""Row-wise views of SGLang's sampling state.

One round samples at several rows of a request (the exact tail) and at none of another;
SGLang's SamplingBatchInfo has one row per request. `filter_batch` with repeated
indices gives exactly that view (sglang/srt/sampling/sampling_batch_info.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_parse.sgl.scheduler_types import RoundBatch
from sglang_parse.sgl.upload import upload


class _NoPenalizer:
    """Penalties are in the accumulated buffers by now; nothing to filter."""

    def filter(self, keep_indices: Tensor) -> None:
        return None


def expand_rows(sampling_info: Any, index: list[int], device: Any) -> Any:
    """A copy of forward-only `sampling_info` with one row per entry of `index`; it
    shares the rows where these are all of them, in their order."""
    info = dataclasses.replace(sampling_info, penalizer_orchestrator=_NoPenalizer())
    if index != list(range(len(sampling_info))):
        rows = upload(index, device, torch.int64)
        info.filter_batch(index, rows)
        for name in ("acc_additive_penalties", "acc_scaling_penalties"):
            value = getattr(info, name)
            if value is not None:
                setattr(info, name, value[rows])
    # Grammar masks are per row here (grammar.py), not per request.
    info.grammars = None
    info.penalizer_orchestrator = None
    return info


def draft_rows(sampling_info: Any, index: list[int], device: Any) -> Any:
    """Sampling parameters alone, one row per entry of `index`: temperature, top-p,
    top-k and min-p. Requests with anything else are not drafted for."""
    bare = dataclasses.replace(
        sampling_info,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
    )
    rows = expand_rows(bare, index, device)
    rows.grammars = agree_across_ranks()
    return rows


def agree_across_ranks() -> list[None] | None:
    """`SamplingBatchInfo.grammars` that has the sampler agree on tokens between ranks.

    All that it reads of the list is whether there is one (layers/sampler.py,
    `_sync_token_ids_across_tp`). Logits may differ in their last bits from rank to
    rank, and the shapes of all that follows hang on the tokens.
    """
    return [None] if get_parallel().tp_size > 1 else None


@dataclasses.dataclass
class TokenNeeds:
    """What the round's requests want to know of sampled tokens, a row each."""

    return_logprob: bool
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[list[int] | None]


def token_needs(batch: RoundBatch, owner: Sequence[int]) -> TokenNeeds:
    """What the batch's requests want to know, a row per sampled row."""
    tops, ids = batch.top_logprobs_nums, batch.token_ids_logprobs
    if not batch.return_logprob or tops is None or ids is None:
        return TokenNeeds(False, [], [])
    return TokenNeeds(True, [tops[i] for i in owner], [ids[i] for i in owner])


def sample_rows(
    runner: Any,
    logits: Tensor,
    *,
    sampling_info: Any,
    positions: Tensor,
    grammar_mask: Any,
    needs: TokenNeeds,
) -> tuple[Tensor, LogitsProcessorOutput]:
    """The target's own token at each row, sampled as SGLang samples in a decode step.

    logits: [rows, vocab], modified in place. sampling_info: one row each
    (`expand_rows`). positions: [rows] of the token each row was computed from.
    grammar_mask: GrammarMask of the rows or None.
    Source: sglang/srt/model_executor/model_runner.py, `sample`.
    """
    output = LogitsProcessorOutput(next_token_logits=logits)
    sampling_info.grammar_mask = grammar_mask
    sampling_info.apply_logits_bias(logits)
    sampling_info.grammar_mask = None
    sampling_info.grammars = agree_across_ranks()
    tokens = runner.sampler(
        output,
        sampling_info,
        needs.return_logprob,
        needs.top_logprobs_nums,
        needs.token_ids_logprobs,
        positions,
    )
    output.next_token_logits = None  # rows by vocabulary: not kept with the logprobs
    return tokens.to(torch.int64), output


# What the sampler returns for each row where logprobs are requested.
ROW_LISTS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)


def join_outputs(outputs: Sequence[LogitsProcessorOutput]) -> LogitsProcessorOutput:
    """The logprobs of several `sample_rows`, their rows one after the other.

    SGLang fills a list only where some row of the call wants it, with tensors
    (layers/logprob_processor.py); the rows of the other calls are empty then.
    """
    joined = LogitsProcessorOutput(next_token_logits=None)
    values = [output.next_token_logprobs for output in outputs]
    if values and values[0] is not None:
        joined.next_token_logprobs = torch.cat(values)
    for name in ROW_LISTS:
        parts: list[Any] = [getattr(output, name) for output in outputs]
        if any(part is not None for part in parts):
            like = next(part[0] for part in parts if part is not None)
            rows: list[Any] = []
            for part, chosen in zip(parts, values, strict=True):
                rows += [like[:0]] * len(chosen) if part is None else part
            setattr(joined, name, rows)
    return joined
