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
from torch import Tensor

from sglang_parse.plan import VerifyPlan
from sglang_parse.routes import (
    ParseVerifyInput,
    build_verify_input,
    place_slots,
    room_for,
)
from sglang_parse.startup import choose_route


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

    def __init__(
        self, target_worker: Any, spec_algorithm: Any, route: str = "auto"
    ) -> None:
        """route: the setting `verify_route`."""
        self.asked_route = route
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
        scratch: Tensor,
        table: Tensor,
    ) -> VerifyOutput:
        """Run the pass. scratch: [plan.num_suffix_tokens] int64 slots.

        req_pool_indices: [bs]. table: req_to_token. Writes target KV of the
        bonus and draft tokens at columns seq_len.. of their rows.
        """
        device = table.device
        slots, out_cache_loc = place_slots(
            plan, rows=req_pool_indices.tolist(), scratch=scratch, table=table
        )
        verdict_rows = [r for rows in plan.verdict_rows for r in rows]
        logits_rows = torch.tensor(verdict_rows or [0], device=device)
        backend = self.runner.prefill_attention_backend_str
        route = choose_route(self.asked_route, backend)
        spec_info = build_verify_input(route, backend, plan, slots, logits_rows)
        forward_batch = ForwardBatch(
            input_ids=plan.input_ids.to(device),
            out_cache_loc=out_cache_loc,
            positions=plan.positions.to(device),
            spec_algorithm=self.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            global_num_token_non_padded_cpu=plan.num_verify_tokens,
            **spec_info.batch_fields(req_pool_indices),
        )
        self.runner.kv_index_translator.bind_own_plan(forward_batch)
        with room_for(
            self.runner.attn_backend,
            num_sequences=forward_batch.batch_size,
            num_requests=len(plan.seq_lens),
        ):
            result = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
        logits = result.logits_output.next_token_logits
        return VerifyOutput(
            hidden_states=result.logits_output.hidden_states,
            verdict_logits=logits[: len(verdict_rows)],
        )

    def decode(
        self,
        *,
        input_ids: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        table: Tensor,
        return_hidden_states: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """One ordinary decode step: logits [bs, vocab], hidden states [bs, hidden].

        input_ids: [bs], the bonus tokens; seq_lens: tokens before them. A round in
        which nobody drafted is the target's own decode step, at its price.
        """
        wanted = CaptureHiddenMode.LAST if return_hidden_states else None
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(input_ids),
            input_ids=input_ids,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens + 1,
            seq_lens_cpu=seq_lens_cpu + 1,
            seq_lens_sum=int(seq_lens_cpu.sum()) + len(input_ids),
            out_cache_loc=table[req_pool_indices, seq_lens].to(torch.int64),
            positions=seq_lens,
            spec_algorithm=self.spec_algorithm,
            capture_hidden_mode=wanted or CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            global_num_token_non_padded_cpu=len(input_ids),
        )
        self.runner.kv_index_translator.bind_own_plan(forward_batch)
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        output = result.logits_output
        return output.next_token_logits, output.hidden_states

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
