"""The server arguments that PARSE cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import envs

from sglang_parse.integration.checks import check_head, check_pair
from sglang_parse.integration.flags import config_from_server_args
from sglang_parse.options.server import ParseConfig
from sglang_parse.runtime.model_folder import quantization_of
from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND
from sglang_parse.target.backends.registry import BACKENDS, backend_of, choose_route


class Refused(NamedTuple):
    """An argument of SGLang, some values of which PARSE refuses."""

    #: Field of ServerArgs.
    field: str
    #: Whether a value, which is not None, is refused.
    is_refused: Callable[[Any], bool]
    #: The command-line flag that sets the field.
    flag: str
    #: What the error says was expected.
    expected: str = "off"


def _above_one(value: Any) -> bool:
    return bool(value > 1)


def _other_than(allowed: Any) -> Callable[[Any], bool]:
    return lambda value: bool(value != allowed)


REFUSED = (
    Refused("pp_size", _above_one, "--pipeline-parallel-size", "1"),
    Refused("attn_dp_size", _above_one, "--attn-dp-size", "1"),
    Refused(
        "disaggregation_mode", _other_than("null"), "--disaggregation-mode", "null"
    ),
    Refused("enable_lora", bool, "--enable-lora"),
    Refused("lora_paths", bool, "--lora-paths", "unset"),
    Refused("enable_hisparse", bool, "--enable-hisparse"),
    # KV that comes from elsewhere has none beside it in the draft model's pool, and no
    # test of ours has run with these.
    Refused("hicache_storage_backend", bool, "--hicache-storage-backend", "unset"),
    Refused("enable_lmcache", bool, "--enable-lmcache"),
    Refused("enable_flexkv", bool, "--enable-flexkv"),
    Refused(
        "enable_unified_cache_external_linker",
        bool,
        "--enable-unified-cache-external-linker",
    ),
    # Their slots, positions or prefills are not those of one pool on one rank.
    Refused("dcp_size", _above_one, "--dcp-size", "1"),
    Refused("attn_cp_size", _above_one, "--attn-cp-size", "1"),
    Refused("enable_prefill_cp", bool, "--enable-prefill-cp"),
    Refused("enable_pdmux", bool, "--enable-pdmux"),
    # Batches then need what SGLang's scheduler alone gives them (require_mlp_sync).
    Refused("moe_dense_tp_size", lambda _: True, "--moe-dense-tp-size", "unset"),
    Refused("moe_a2a_backend", _other_than("none"), "--moe-a2a-backend", "none"),
    # It takes a pass's sequences for its requests (kv_canary/plan_input.py).
    Refused("kv_canary", _other_than("none"), "--kv-canary", "none"),
    Refused("enable_two_batch_overlap", bool, "--enable-two-batch-overlap"),
    Refused("enable_mixed_chunk", bool, "--enable-mixed-chunk"),
    # A state is kept as it was, in a slot of its own for each request.
    Refused(
        "mamba_radix_cache_strategy",
        lambda value: bool(value not in ("auto", "no_buffer")),
        "--mamba-radix-cache-strategy",
        "no_buffer",
    ),
    Refused("enable_linear_replayssm", bool, "--enable-linear-replayssm"),
    Refused("enable_linear_replayssm_spec", bool, "--enable-linear-replayssm-spec"),
    Refused("enable_int8_mamba_checkpoint", bool, "--enable-int8-mamba-checkpoint"),
    # Its grammars cannot go back over a rejected draft.
    Refused(
        "grammar_backend",
        lambda value: bool(value == "outlines"),
        "--grammar-backend",
        "xgrammar, llguidance or none",
    ),
    # What runs then is none of the models that families.toml names.
    Refused(
        "model_impl",
        lambda value: bool(value not in ("auto", "sglang")),
        "--model-impl",
        "auto or sglang",
    ),
    # SGLang starts those HTTP workers without its plugins: no bad option would be
    # refused before it reaches the scheduler.
    Refused("tokenizer_worker_num", _above_one, "--tokenizer-worker-num", "1"),
    # Their requests pass no TokenizerManager, which checks options, and their answers
    # have no place for reports.
    Refused("grpc_mode", bool, "--grpc-mode", "off (HTTP alone carries reports)"),
    Refused(
        "smg_grpc_mode", bool, "--smg-grpc-mode", "off (HTTP alone carries reports)"
    ),
    # It takes the KV of an answer's last token for written (streaming_session.py).
    Refused("enable_streaming_session", bool, "--enable-streaming-session"),
    # Every request gets a grammar of its own, which nobody can judge around.
    Refused("enable_strict_thinking", bool, "--enable-strict-thinking"),
    # Of SGLang's own ways to verify; what they ask for would not happen.
    Refused(
        "speculative_use_rejection_sampling",
        bool,
        "--speculative-use-rejection-sampling",
    ),
    Refused(
        "speculative_use_block_verification",
        bool,
        "--speculative-use-block-verification",
    ),
    Refused(
        "speculative_accept_threshold_single",
        _other_than(1),
        "--speculative-accept-threshold-single",
        "1 (--speculative-parse-threshold is that of verdicts)",
    ),
    Refused(
        "speculative_accept_threshold_acc",
        _other_than(1),
        "--speculative-accept-threshold-acc",
        "1",
    ),
    Refused("speculative_token_map", bool, "--speculative-token-map", "unset"),
    Refused("speculative_adaptive", bool, "--speculative-adaptive"),
    Refused("skip_tokenizer_init", bool, "--skip-tokenizer-init"),
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
    _check_arguments(server_args)
    _check_page_size(server_args)
    _check_attention_backends(server_args)
    _check_parts(server_args, config)
    _check_quantization(server_args)
    _check_hierarchical_cache(server_args, config)
    prefill, _ = attention_backends_of(server_args)
    if prefill == "flashinfer" and server_args.dtype in ("float32", "float"):
        raise ValueError(
            f"--dtype is {server_args.dtype} and FlashInfer has no kernels for it; "
            "expected half, float16 or bfloat16, or --attention-backend triton."
        )
    _check_environment()
    check_pair(server_args, config)
    check_head(server_args, config)


def _check_arguments(server_args: Any) -> None:
    for row in REFUSED:
        value = getattr(server_args, row.field, None)
        if value is not None and row.is_refused(value):
            raise ValueError(
                f"--speculative-algorithm PARSE does not support {row.flag} {value}; "
                f"expected {row.expected}."
            )


def _check_page_size(server_args: Any) -> None:
    """Prefills that are cut end with a page: SGLang would stop in an assertion."""
    page, chunk = server_args.page_size or 1, server_args.chunked_prefill_size or 0
    if page < 1 or (chunk > 0 and chunk % page):
        raise ValueError(
            f"--page-size is {page}; expected a divisor of --chunked-prefill-size, "
            f"which is {chunk}."
        )


def _check_attention_backends(server_args: Any) -> None:
    """Each one that is named can serve a verify pass, on this device."""
    on_cpu = _on_cpu(server_args)
    for field in _BACKEND_FIELDS:
        backend, flag = getattr(server_args, field, None), field.replace("_", "-")
        if backend == CPU_ATTENTION_BACKEND and not on_cpu:
            raise ValueError(
                f"--{flag} {backend} runs on CPU alone; leave it out, or set "
                "SGLANG_PLATFORM=parse_cpu."
            )
        if backend is not None and backend not in BACKENDS:
            raise ValueError(
                f"--speculative-algorithm PARSE does not support --{flag} {backend}; "
                f"expected one of {', '.join(BACKENDS)}."
            )


def _check_parts(server_args: Any, config: ParseConfig) -> None:
    """What the backends of prefills and of steps do for PARSE, they can do."""
    prefill, decode = attention_backends_of(server_args)
    mode = server_args.speculative_attention_mode
    if prefill != decode and mode != "prefill":
        raise ValueError(
            f"--speculative-attention-mode is {mode}, and PARSE verifies on the "
            f"backend for prefills, which is {prefill}; expected prefill."
        )
    choose_route(config.verify_route, prefill)
    steps = server_args.speculative_draft_attention_backend or decode
    if config.composes and steps == "fa3":
        # It adds SGLang's own draft steps to lengths (flashattention_backend.py).
        raise ValueError(
            f"--speculative-parse-compose {config.compose} cannot draft on attention "
            "backend fa3; add --speculative-draft-attention-backend flashinfer."
        )
    most, page = backend_of(prefill).max_page_size, server_args.page_size or 1
    if page > most:
        raise ValueError(
            f"--page-size is {page}; expected at most {most} where PARSE verifies on "
            f"attention backend {prefill}."
        )


def _check_hierarchical_cache(server_args: Any, config: ParseConfig) -> None:
    """KV that it brings back has no hidden states of the target beside it."""
    if server_args.enable_hierarchical_cache and config.composes:
        raise ValueError(
            f"--speculative-parse-compose {config.compose} would have the target read "
            "again what --enable-hierarchical-cache brings back; leave one of them out."
        )


def _check_quantization(server_args: Any) -> None:
    """SGLang's kernels for quantised weights are there, of target and draft."""
    if not _on_cpu(server_args):
        return
    draft = "--speculative-draft-model-"
    for method, flag, path, path_flag in (
        (
            server_args.quantization,
            "--quantization",
            server_args.model_path,
            "--model-path",
        ),
        (
            server_args.speculative_draft_model_quantization,
            f"{draft}quantization",
            server_args.speculative_draft_model_path,
            f"{draft}path",
        ),
    ):
        if method not in (None, "unquant"):
            raise ValueError(
                f"{flag} is {method}, whose kernels run on a GPU alone; expected unset."
            )
        if path and (method := quantization_of(path)):
            raise ValueError(
                f"{path_flag} {path!r} holds weights quantised by {method}, whose "
                "kernels run on a GPU alone; expected weights that are not quantised."
            )


def _on_cpu(server_args: Any) -> bool:
    return server_args.device == "cpu" or not torch.cuda.is_available()


def _check_environment() -> None:
    for variable, why in (
        (
            envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING,
            "leaves no memory for passes outside captured graphs",
        ),
        (envs.SGLANG_RUST_SERVER, "sends no reports"),
    ):
        if variable.get():
            raise ValueError(
                f"--speculative-algorithm PARSE does not support {variable.name}=1, "
                f"which {why}; unset it."
            )
