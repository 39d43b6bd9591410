"""The arguments of SGLang that PARSE cannot serve."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of
from sglang.srt.environ import envs

from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import DRAFT_HEADS, flag_name
from sglang_parse.sgl.model_folder import quantization_of
from sglang_parse.verify.backends.routes import BACKENDS, backend_of

UNSET = (None, False)
_OWN_VERIFICATION = "it is of SGLang's own verification, which PARSE does not run"
_ONE_POOL = "slots and positions of a pass are those of one pool on one rank"
_OTHER_KV = "what it brings back is missing in the draft model's KV pool"
_NO_REPORTS = "its requests pass no TokenizerManager, so that they have no reports"
_TO_THE_BIT = (
    "a token's logits come from a pass or from a step, whose last bits differ, and "
    "load and time decide which"
)
_LORA = "the rows of a verify pass carry no adapter"
# Fields of ServerArgs with the values that PARSE serves, and why no others; None and
# empty ones are served in any case. docs/guide/memory-and-limits.md shows them.
SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "pp_size": ((1,), "a pass runs on one stage"),
    "attn_dp_size": (
        (1,),
        "its ranks would have to agree on the forwards of every step, idle ones too",
    ),
    "disaggregation_mode": (
        ("null",),
        "a decode server begins requests without the prefill that drafts start from",
    ),
    "enable_lora": (UNSET, _LORA),
    "lora_paths": (UNSET, _LORA),
    "enable_hisparse": (UNSET, "a pass reads all KV of its prefix on the device"),
    "hicache_storage_backend": (UNSET, _OTHER_KV),
    "enable_flexkv": (UNSET, _OTHER_KV),
    "enable_unified_cache_external_linker": (UNSET, _OTHER_KV),
    "dcp_size": ((1,), _ONE_POOL),
    "attn_cp_size": ((1,), _ONE_POOL),
    "enable_prefill_cp": (UNSET, _ONE_POOL),
    "enable_pdmux": (UNSET, "a pass and a prefill would run side by side"),
    "moe_dense_tp_size": (
        UNSET,
        "batches then need what SGLang's scheduler alone gives them",
    ),
    "moe_a2a_backend": (
        ("none",),
        "its ranks would have to agree on the forwards of every step",
    ),
    "kv_canary": (
        ("none",),
        "it would mistake the sequences of a pass for requests",
    ),
    "enable_two_batch_overlap": (UNSET, "it splits batches that a pass needs whole"),
    "enable_mixed_chunk": (UNSET, "a pass and a prefill would be one batch"),
    "grammar_backend": (
        ("xgrammar", "llguidance", "none"),
        "its grammars cannot go back over a rejected draft",
    ),
    "model_impl": (("auto", "sglang"), "no test has proven models of another one"),
    "grpc_mode": (UNSET, _NO_REPORTS),
    "smg_grpc_mode": (UNSET, _NO_REPORTS),
    "enable_streaming_session": (
        UNSET,
        "it assumes that the KV of an answer's last token is written",
    ),
    "enable_strict_thinking": (
        UNSET,
        "no answer under a grammar is judged, and its filter runs on no CPU, so "
        "that no test has proven it in exact mode",
    ),
    "rl_on_policy_target": (UNSET, _TO_THE_BIT),
    "enable_deterministic_inference": (UNSET, _TO_THE_BIT),
    "speculative_use_rejection_sampling": (UNSET, _OWN_VERIFICATION),
    "speculative_accept_threshold_single": ((1,), _OWN_VERIFICATION),
    "speculative_accept_threshold_acc": ((1,), _OWN_VERIFICATION),
    "speculative_token_map": (UNSET, _OWN_VERIFICATION),
    "speculative_adaptive": (UNSET, _OWN_VERIFICATION),
}
_FLAGS = {"pp_size": "pipeline-parallel-size"}
_BACKEND_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)


def check_arguments(server_args: Any, config: ParseConfig | None = None) -> None:
    """Raise ValueError for the first argument with a value that is not served."""
    for field, (served, why) in SERVED.items():
        value = getattr(server_args, field, None)
        if value is None or value in served or (served is UNSET and not value):
            continue
        raise ValueError(
            f"--speculative-algorithm PARSE does not support {flag_of(field)} {value}: "
            f"{why}; expected {told(served)}."
        )


def flag_of(field: str) -> str:
    """SGLang's flag of a field of ServerArgs."""
    return f"--{_FLAGS.get(field, field.replace('_', '-'))}"


def told(served: tuple[Any, ...]) -> str:
    """The values that are served, in words."""
    return "unset" if served is UNSET else " or ".join(map(str, served))


def check_page_size(server_args: Any, config: ParseConfig) -> None:
    """Chunks of a prefill end with a page; SGLang would stop in an assertion."""
    page, chunk = server_args.page_size or 1, server_args.chunked_prefill_size or 0
    if page < 1 or (chunk > 0 and chunk % page):
        raise ValueError(
            f"--page-size is {page}; expected a divisor of --chunked-prefill-size, "
            f"which is {chunk}."
        )


def check_attention_backends(server_args: Any, config: ParseConfig) -> None:
    """Each backend that is named can serve a verify pass on this device."""
    for field in _BACKEND_FIELDS:
        backend, flag = getattr(server_args, field, None), field.replace("_", "-")
        if backend is not None and backend not in BACKENDS:
            raise ValueError(
                f"--speculative-algorithm PARSE does not support --{flag} {backend}; "
                f"expected one of {', '.join(BACKENDS)}."
            )
    prefill, _ = attention_backends_of(server_args)
    if prefill == "flashinfer" and server_args.dtype in ("float32", "float"):
        raise ValueError(
            f"--dtype is {server_args.dtype} and FlashInfer has no kernels for it; "
            "expected half, float16 or bfloat16, or --attention-backend triton."
        )


def check_parts(server_args: Any, config: ParseConfig) -> None:
    """The backends of prefills and of decode steps can do what PARSE asks of each."""
    prefill, decode = attention_backends_of(server_args)
    mode = server_args.speculative_attention_mode
    if prefill != decode and mode != "prefill":
        raise ValueError(
            f"--speculative-attention-mode is {mode}, and PARSE verifies on the "
            f"backend for prefills, which is {prefill}; expected prefill."
        )
    steps = server_args.speculative_draft_attention_backend or decode
    for option, has_head in (
        ("compose", config.composes),
        ("draft_compose", config.draft_guesser in DRAFT_HEADS),
    ):
        if has_head and steps == "fa3":
            # It adds SGLang's own draft steps to lengths (flashattention_backend.py).
            raise ValueError(
                f"{flag_name(option)} {getattr(config, option)} cannot draft on "
                "attention backend fa3; add --speculative-draft-attention-backend "
                "flashinfer."
            )
    most, page = backend_of(prefill).max_page_size, server_args.page_size or 1
    if page > most:
        raise ValueError(
            f"--page-size is {page}; expected at most {most} where PARSE verifies on "
            f"attention backend {prefill}."
        )


def check_hierarchical_cache(server_args: Any, config: ParseConfig) -> None:
    """A head needs hidden states, which the cache does not bring back with the KV."""
    if server_args.enable_hierarchical_cache and config.composes:
        raise ValueError(
            f"--speculative-parse-compose {config.compose} would have the target read "
            "again what --enable-hierarchical-cache brings back; leave one of them out."
        )


def check_quantization(server_args: Any, config: ParseConfig) -> None:
    """On CPU, no weights are quantised: SGLang's kernels for them run on GPUs."""
    if server_args.device != "cpu" and torch.cuda.is_available():
        return
    for method_field, path_field in (
        ("quantization", "model_path"),
        ("speculative_draft_model_quantization", "speculative_draft_model_path"),
    ):
        method, path = (getattr(server_args, f) for f in (method_field, path_field))
        if method not in (None, "unquant"):
            raise ValueError(
                f"--{method_field.replace('_', '-')} is {method}, whose kernels run on "
                "a GPU alone; expected unset."
            )
        if path and (method := quantization_of(path)):
            raise ValueError(
                f"--{path_field.replace('_', '-')} {path!r} holds weights quantised by "
                f"{method}, whose kernels run on a GPU alone; expected weights that "
                "are not quantised."
            )


def check_environment(server_args: Any, config: ParseConfig) -> None:
    """Raise ValueError for switches of SGLang's environment that are not served."""
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
