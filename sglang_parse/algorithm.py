"""The PARSE algorithm object that SGLang dispatches on, and its start-up checks."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_parse.flags import config_from_server_args
from sglang_parse.platform_entry import ATTENTION_BACKEND
from sglang_parse.startup import (
    ROUTES_OF_BACKEND,
    check_head,
    check_pair,
    choose_route,
)

logger = logging.getLogger(__name__)

SUPPORTED_ATTENTION_BACKENDS = tuple(ROUTES_OF_BACKEND)
# SGLang sizes per-round reserves and buffers by this width. PARSE takes the slots of
# a round inside the round (memory.py), so the smallest legal width is right: 2 is the
# least that keeps TokenizerManager's `num_draft_tokens - 1` positive.
NUM_DRAFT_TOKENS = 2
_WIDTHS = {
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_DRAFT_TOKENS,
}
DEFAULT_MAX_RUNNING_REQUESTS = 48

_REFUSED = (
    ("pp_size", lambda v: v > 1, "--pipeline-parallel-size", "1"),
    ("attn_dp_size", lambda v: v > 1, "--attn-dp-size", "1"),
    ("disaggregation_mode", lambda v: v != "null", "--disaggregation-mode", "null"),
    ("enable_lora", bool, "--enable-lora", "off"),
    ("lora_paths", bool, "--lora-paths", "unset"),
    ("enable_hisparse", bool, "--enable-hisparse", "off"),
    ("enable_hierarchical_cache", bool, "--enable-hierarchical-cache", "off"),
    # KV that comes from elsewhere has none beside it in the draft model's pool.
    ("enable_lmcache", bool, "--enable-lmcache", "off"),
    ("enable_flexkv", bool, "--enable-flexkv", "off"),
    (
        "enable_unified_cache_external_linker",
        bool,
        "--enable-unified-cache-external-linker",
        "off",
    ),
    # Their slots, positions or prefills are not those of one pool on one rank.
    ("dcp_size", lambda v: v > 1, "--dcp-size", "1"),
    ("attn_cp_size", lambda v: v > 1, "--attn-cp-size", "1"),
    ("enable_prefill_cp", bool, "--enable-prefill-cp", "off"),
    ("enable_pdmux", bool, "--enable-pdmux", "off"),
    # Batches then need what SGLang's scheduler alone gives them (require_mlp_sync).
    ("moe_dense_tp_size", lambda v: True, "--moe-dense-tp-size", "unset"),
    ("moe_a2a_backend", lambda v: v != "none", "--moe-a2a-backend", "none"),
    # It takes a pass's sequences for its requests (kv_canary/plan_input.py).
    ("kv_canary", lambda v: v != "none", "--kv-canary", "none"),
    ("enable_two_batch_overlap", bool, "--enable-two-batch-overlap", "off"),
    ("enable_mixed_chunk", bool, "--enable-mixed-chunk", "off"),
    # Its grammars cannot go back over a rejected draft.
    (
        "grammar_backend",
        lambda v: v == "outlines",
        "--grammar-backend",
        "xgrammar, llguidance or none",
    ),
    # Masks rows of experts by a count that captured graphs of our batches lack.
    ("ep_size", lambda v: v > 1, "--ep-size", "1"),
    # SGLang starts those HTTP workers without its plugins: no bad option would be
    # refused before it reaches the scheduler.
    ("tokenizer_worker_num", lambda v: v > 1, "--tokenizer-worker-num", "1"),
    # It takes the KV of an answer's last token for written (streaming_session.py).
    ("enable_streaming_session", bool, "--enable-streaming-session", "off"),
    # Every request gets a grammar of its own, which nobody can judge around.
    ("enable_strict_thinking", bool, "--enable-strict-thinking", "off"),
    # Of SGLang's own ways to verify; what they ask for would not happen.
    (
        "speculative_use_rejection_sampling",
        bool,
        "--speculative-use-rejection-sampling",
        "off",
    ),
    (
        "speculative_use_block_verification",
        bool,
        "--speculative-use-block-verification",
        "off",
    ),
    (
        "speculative_accept_threshold_single",
        lambda v: v != 1,
        "--speculative-accept-threshold-single",
        "1 (--speculative-parse-threshold is that of verdicts)",
    ),
    (
        "speculative_accept_threshold_acc",
        lambda v: v != 1,
        "--speculative-accept-threshold-acc",
        "1",
    ),
    ("speculative_token_map", bool, "--speculative-token-map", "unset"),
    ("speculative_adaptive", bool, "--speculative-adaptive", "off"),
    ("skip_tokenizer_init", bool, "--skip-tokenizer-init", "off"),
)

_BACKEND_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)


def validate_server_args(server_args: Any) -> None:
    """Refuse what PARSE cannot serve. Raises ValueError with one sentence."""
    config = config_from_server_args(server_args)
    for field, is_refused, flag, expected in _REFUSED:
        value = getattr(server_args, field, None)
        if value is not None and is_refused(value):
            raise ValueError(
                f"--speculative-algorithm PARSE does not support {flag} {value}; "
                f"expected {expected}."
            )
    if server_args.page_size not in (None, 1):
        raise ValueError(
            "--speculative-algorithm PARSE needs --page-size 1, got "
            f"{server_args.page_size}."
        )
    for field in _BACKEND_FIELDS:
        backend = getattr(server_args, field, None)
        on_cpu = server_args.device == "cpu" or not torch.cuda.is_available()
        if backend == ATTENTION_BACKEND and not on_cpu:
            raise ValueError(
                f"--{field.replace('_', '-')} {backend} runs on CPU alone; leave it "
                "out, or set SGLANG_PLATFORM=parse_cpu."
            )
        if backend is not None and backend not in SUPPORTED_ATTENTION_BACKENDS:
            raise ValueError(
                "--speculative-algorithm PARSE does not support "
                f"--{field.replace('_', '-')} {backend}; expected one of "
                f"{', '.join(SUPPORTED_ATTENTION_BACKENDS)}."
            )
    prefill, decode = attention_backends_of(server_args)
    if prefill != decode:
        raise ValueError(
            "--speculative-algorithm PARSE needs one attention backend for prefill and "
            f"decode, got {prefill} and {decode}; set --attention-backend alone."
        )
    choose_route(config.verify_route, prefill)
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise ValueError(
            "--speculative-algorithm PARSE does not support "
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1, which leaves no memory for passes "
            "outside captured graphs; unset it."
        )
    if envs.SGLANG_RUST_SERVER.get():
        raise ValueError(
            "--speculative-algorithm PARSE does not support SGLANG_RUST_SERVER=1, "
            "which sends no reports; unset it."
        )
    check_pair(server_args, config)
    check_head(server_args, config)


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
        server_args.page_size = 1
        if server_args.enable_memory_saver:
            # Released weights come back for the target alone, by a weight update.
            server_args.enable_draft_weights_cpu_backup = True
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
