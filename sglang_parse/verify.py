"""VerifyPlan -> one target forward -> hidden states and verdict logits.

The pass runs in SGLang's TARGET_VERIFY mode with our own spec input, which hands the
attention backend the ragged CSR arrays and the mask. The LM head runs at the verdict
rows inside the pass and, in a second small call, at the rows the decision needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_parse.plan import RowVisibility, VerifyPlan, build_custom_mask


class ParseVerifyInput(SpecInput):
    """Spec input of the verify pass: what attention backends ask for.

    kv_index: KV slots per request, [kv_len] each, in the plan's column order.
    logits_rows: [n] int64 rows of the pass at which the LM head runs.
    """

    cuda_graph_compatible = False

    def __init__(
        self, plan: VerifyPlan, kv_index: list[Tensor], logits_rows: Tensor
    ) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.plan = plan
        self.kv_index = kv_index
        self.logits_rows = logits_rows
        self.draft_token_num = max(plan.qo_lens)
        self.capture_hidden_mode = CaptureHiddenMode.FULL

    def attention_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        """Rows for the torch backend (attention.py, `plan_tiles`)."""
        return self.plan.visibility, list(self.plan.qo_lens), self.kv_index

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """FlashInfer's arguments: kv_indices, kv_indptr, qo_indptr int32, custom_mask.

        Source: sglang/srt/layers/attention/flashinfer_backend.py, `call_begin_forward`.
        """
        device = req_pool_indices.device
        return (
            torch.cat(self.kv_index).to(torch.int32),
            running_offsets(self.plan.kv_lens, device),
            running_offsets(self.plan.qo_lens, device),
            build_custom_mask(self.plan).to(device),
        )


def running_offsets(lens: Sequence[int], device: Any) -> Tensor:
    """[len(lens) + 1] int32 offsets, first entry 0."""
    offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lens).cumsum(0)
    return offsets.to(device)


def select_logits_rows(result: LogitsMetadata, *args: Any, **_: Any) -> LogitsMetadata:
    """AFTER hook on LogitsMetadata.from_forward_batch: LM head at our rows only."""
    spec_info = getattr(args[-1], "spec_info", None)
    if isinstance(spec_info, ParseVerifyInput):
        result.draft_extend_select_index = spec_info.logits_rows
    return result


@dataclass(frozen=True)
class VerifyOutput:
    """hidden_states: [num_verify_tokens, hidden], after the final norm.
    verdict_logits: [number of suffixes, vocab], request by request."""

    hidden_states: Tensor
    verdict_logits: Tensor


class TargetVerifier:
    """Runs verify passes and LM-head calls on the target model."""

    def __init__(self, target_worker: Any, spec_algorithm: Any) -> None:
        self.target_worker = target_worker
        self.runner = target_worker.model_runner
        self.spec_algorithm = spec_algorithm
        model = self.runner.model
        if not hasattr(model, "lm_head") or not hasattr(model, "logits_processor"):
            raise ValueError(
                f"--model-path: {type(model).__name__} has no lm_head and "
                "logits_processor of its own, which PARSE needs to read verdicts; "
                "choose another target model."
            )

    def verify(
        self,
        plan: VerifyPlan,
        *,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        scratch: Tensor,
        table: Tensor,
    ) -> VerifyOutput:
        """Run the pass. scratch: [plan.num_suffix_tokens] int64 slots.

        req_pool_indices, seq_lens: [bs]. table: req_to_token. Writes target KV of the
        bonus and draft tokens at columns seq_len.. of their rows.
        """
        device = seq_lens.device
        kv_index, out_cache_loc = place_slots(
            plan, rows=req_pool_indices.tolist(), scratch=scratch, table=table
        )
        verdict_rows = [r for rows in plan.verdict_rows for r in rows]
        logits_rows = torch.tensor(verdict_rows or [0], device=device)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(plan.seq_lens),
            input_ids=plan.input_ids.to(device),
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            seq_lens_cpu=torch.tensor(plan.seq_lens),
            seq_lens_sum=sum(plan.seq_lens),
            out_cache_loc=out_cache_loc,
            positions=plan.positions.to(device),
            spec_algorithm=self.spec_algorithm,
            spec_info=ParseVerifyInput(plan, kv_index, logits_rows),
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            global_num_token_non_padded_cpu=plan.num_verify_tokens,
        )
        self.runner.kv_index_translator.bind_own_plan(forward_batch)
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        logits = result.logits_output.next_token_logits
        return VerifyOutput(
            hidden_states=result.logits_output.hidden_states,
            verdict_logits=logits[: len(verdict_rows)],
        )

    def logits_at(self, output: VerifyOutput, rows: Sequence[int]) -> Tensor:
        """Target logits [len(rows), vocab] at rows of the pass."""
        index = torch.tensor(rows, device=output.hidden_states.device)
        model = self.runner.model
        result = model.logits_processor(
            None,
            output.hidden_states[index],
            model.lm_head,
            LogitsMetadata(forward_mode=ForwardMode.DECODE),
        )
        return result.next_token_logits


def place_slots(
    plan: VerifyPlan, *, rows: Sequence[int], scratch: Tensor, table: Tensor
) -> tuple[list[Tensor], Tensor]:
    """KV slots of every column of a request, and the slots the pass writes.

    Returns ([kv_len] slots per request, [num_verify_tokens] int64).
    """
    kv_index = []
    at = 0
    for i, row in enumerate(rows):
        num_row_columns = plan.seq_lens[i] + 1 + plan.num_draft_tokens[i]
        num_scratch = plan.kv_lens[i] - num_row_columns
        own = table[row, :num_row_columns].to(torch.int64)
        kv_index.append(torch.cat([own, scratch[at : at + num_scratch]]))
        at += num_scratch
    written = [k[n:] for k, n in zip(kv_index, plan.seq_lens, strict=True)]
    return kv_index, torch.cat(written)
