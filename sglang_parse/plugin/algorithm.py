"""The PARSE algorithm object that SGLang dispatches on."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

# SGLang sizes reserves and buffers by this width. PARSE allocates the slots of a round
# itself (sgl/slots.py), so the smallest width that keeps TokenizerManager's
# `num_draft_tokens - 1` positive is right.
NUM_DRAFT_TOKENS = 2
_WIDTHS = {
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_DRAFT_TOKENS,
}
DEFAULT_MAX_RUNNING_REQUESTS = 48


class ParseAlgorithm(CustomSpecAlgo):
    """Duck-typed SpeculativeAlgorithm member.

    The three methods below are called unconditionally by the scheduler and missing
    from CustomSpecAlgo (sglang/srt/managers/scheduler.py, `init_disaggregation`).
    """

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Defaults SGLang sets for built-in algorithms only."""
        server_args.disable_overlap_schedule = True
        for field, ours in _WIDTHS.items():
            value = getattr(server_args, field)
            if value not in (None, ours):
                raise ValueError(
                    f"--speculative-algorithm PARSE takes no "
                    f"--{field.replace('_', '-')}, got {value}; expected "
                    "--speculative-parse-window or --speculative-parse-eagle-steps."
                )
            setattr(server_args, field, ours)
        if server_args.enable_memory_saver:
            # After a release, a weight update restores the weights of the target only.
            server_args.enable_draft_weights_cpu_backup = True
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
