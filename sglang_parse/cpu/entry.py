"""Entry point `sglang.srt.platforms`: whether this machine is ours to serve.

The CPU platform takes the machine only if no accelerator is present and nobody else
asks for it; SGLANG_PARSE_CPU_PLATFORM=0 switches it off, SGLANG_PLATFORM chooses
another one. Nothing of SGLang is imported here: SGLang may resolve its platform while
it is itself half imported.
"""

from __future__ import annotations

import os

SWITCH_ENV = "SGLANG_PARSE_CPU_PLATFORM"
_QUALNAME = "sglang_parse.cpu.platform:ParseCpuPlatform"


def activate() -> str | None:
    """Qualified class name if this machine is ours to serve, else None.

    Source: sglang/srt/platforms/__init__.py, `_resolve_platform`.
    """
    if os.environ.get(SWITCH_ENV, "1").lower() in ("0", "false", "no", "off"):
        return None
    asked = os.environ.get("SGLANG_PLATFORM") or None
    if asked is not None:
        return _QUALNAME if asked == "parse_cpu" else None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _has_accelerator():
        return None
    return _QUALNAME


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
