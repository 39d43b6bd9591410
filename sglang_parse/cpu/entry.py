"""Entry point `sglang.srt.platforms`: whether SGLang uses the CPU platform.

SGLang resolves its platform while it is imported, before it parses any argument, so the
command line and the environment are read here. A server that asks for neither PARSE nor
this platform keeps the one that SGLang chooses. Nothing of SGLang is imported at module
level, because SGLang may be half imported when it loads this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_parse.sgl.names import is_parse

#: "1" serves any server on a machine without an accelerator; "0" switches it off.
SWITCH_ENV = "SGLANG_PARSE_CPU_PLATFORM"
#: The name of the entry point, a value of SGLANG_PLATFORM.
PLATFORM_NAME = "parse_cpu"
_QUALNAME = "sglang_parse.cpu.platform:ParseCpuPlatform"
_FLAG = "--speculative-algo"  # argparse takes a flag's beginning for the flag


def activate() -> str | None:
    """Qualified name of the platform class if SGLang shall use it, else None.

    Source: sglang/srt/platforms/__init__.py, `_resolve_platform`.
    """
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return _QUALNAME
    switch = os.environ.get(SWITCH_ENV)
    is_requested = names_parse(sys.argv) if switch is None else switch == "1"
    if not is_requested or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return None if _has_accelerator() else _QUALNAME


def names_parse(argv: Sequence[str]) -> bool:
    """Whether a command line has --speculative-algorithm PARSE, in either spelling."""
    for flag, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = flag.partition("=")
        if name.startswith(_FLAG) and is_parse(value or following):
            return True
    return False


def _has_accelerator() -> bool:
    from sglang.srt import platforms

    return any(
        is_available()
        for is_available in (
            platforms._is_cuda_available,
            platforms._is_rocm_available,
            platforms._is_npu_available,
            platforms._is_xpu_available,
            platforms._is_musa_available,
            platforms._is_mps_available,
        )
    )
