"""The checks of a start, in one list: each failing one ends it with one sentence.

The first ones run before SGLang looks at a model. The others run when it has resolved
its arguments, and before it loads weights. `sglang-parse doctor` prints the list.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.utils import get_device

from sglang_parse.cpu.entry import SWITCH_ENV
from sglang_parse.cpu.platform import ParseCpuPlatform
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import HEAD_PATHS, flag_name
from sglang_parse.plugin import model_checks as checks
from sglang_parse.plugin import refusals
from sglang_parse.plugin.flags import config_from_server_args
from sglang_parse.probe.open_probe import check_probe_flags
from sglang_parse.sgl.model_folder import context_length, problem_of

# Values of an environment variable that leave a switch off.
OFF = ("", "0", "false", "False")


class StartError(SystemExit, ValueError):
    """A setting with which no server can start; its message is one sentence.

    Python prints the message of a SystemExit that nobody catches, without a traceback.
    """


class StartCheck(NamedTuple):
    """One check of the server's arguments and of our settings."""

    name: str
    #: Raises ValueError with one sentence that names the flag.
    check: Callable[[Any, ParseConfig], object]


def check_early(server_args: Any) -> None:
    """Runs before the first step of SGLang's resolution. Raises StartError."""
    run(EARLY_CHECKS, server_args)


def validate(server_args: Any) -> None:
    """Runs where SGLang validates an algorithm's arguments. Raises StartError."""
    run(LATE_CHECKS, server_args)


def run(start_checks: tuple[StartCheck, ...], server_args: Any) -> None:
    """Raise StartError for the first check that fails."""
    try:
        config = config_from_server_args(server_args)
        for _, check in start_checks:
            check(server_args, config)
    except ValueError as e:
        raise StartError(str(e)) from e


def check_folders(server_args: Any, config: ParseConfig) -> None:
    """Every model folder is complete. Raises ValueError naming the flag and folder."""
    needs_weights = getattr(server_args, "load_format", "auto") != "dummy"
    for flag, path, needs_tokenizer in (
        ("--model-path", server_args.model_path, False),
        (checks.DRAFT_FLAG, server_args.speculative_draft_model_path, True),
        *((flag_name(n), getattr(config, n) or None, False) for n in HEAD_PATHS),
    ):
        if path is None:
            continue
        told = problem_of(
            path, needs_weights=needs_weights, needs_tokenizer=needs_tokenizer
        )
        if told:
            raise ValueError(f"{flag} {path!r} {told}")


def check_context(server_args: Any, config: ParseConfig) -> None:
    """A head reads as long a text as its model. Raises ValueError naming the flag to
    set; SGLang would stop only when it loads the second model."""
    if os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0") not in OFF:
        return
    given = getattr(server_args, "context_length", None)
    longest = given or context_length(server_args.model_path)
    for name, model in zip(HEAD_PATHS, ("target", "draft"), strict=True):
        path = getattr(config, name)
        most = context_length(path) if path else None
        if path and model == "draft":
            own = context_length(server_args.speculative_draft_model_path)
            longest = min(longest or 1 << 60, own or 1 << 60)
        if longest and most and most < longest:
            raise ValueError(
                f"{flag_name(name)} {path!r} reads {most} tokens and the {model} "
                f"{longest}; set --context-length {most} or less."
            )


def check_device(server_args: Any, config: ParseConfig | None = None) -> None:
    """The device is there, and SGLang's platform is for it. Raises ValueError."""
    from sglang.srt.platforms import current_platform

    device = server_args.device
    if str(device or "").split(":", 1)[0] == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"--device is {device!r} and no CUDA GPU is in sight; leave --device "
                "out to serve on the CPU."
            )
        if isinstance(current_platform, ParseCpuPlatform):
            raise ValueError(
                f"--device is {device!r} and the CPU platform is chosen; unset "
                "SGLANG_PLATFORM."
            )
    try:
        get_device()
    except RuntimeError as e:
        raise ValueError(
            f"No accelerator is in sight; set {SWITCH_ENV}=1 to serve on the CPU where "
            "--speculative-algorithm PARSE is not on the command line."
        ) from e


EARLY_CHECKS = (
    StartCheck("draft model", checks.check_draft_model),
    StartCheck("device", check_device),
    StartCheck("model folders", check_folders),
    StartCheck("families of the models", checks.check_families),
    StartCheck("context lengths", check_context),
    StartCheck("probe", check_probe_flags),
    # SGLang would refuse some in the name of what it resolved them to.
    StartCheck("arguments of SGLang", refusals.check_arguments),
)
LATE_CHECKS = (
    StartCheck("resolved arguments", refusals.check_arguments),
    StartCheck("environment", refusals.check_environment),
    StartCheck("page size", refusals.check_page_size),
    StartCheck("attention backends", refusals.check_attention_backends),
    StartCheck("verify route", refusals.check_parts),
    StartCheck("quantization", refusals.check_quantization),
    StartCheck("hierarchical cache", refusals.check_hierarchical_cache),
    StartCheck("tokenizers of the pair", checks.check_pair),
    StartCheck("extensions", checks.check_extensions),
    StartCheck("head of the target", checks.check_head),
)
CHECKS = EARLY_CHECKS + LATE_CHECKS
