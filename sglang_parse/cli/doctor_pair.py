"""What `sglang-parse doctor` says of a pair on this machine: kernels and memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_parse.cli.estimate import ModelShape

# SGLang leaves at least so much of a large card beside weights and pools, and a share
# of a small one (arg_groups/memory_hook.py).
LARGE_CARD, RESERVED, RESERVED_SHARE = 60 * 2**30, 10 * 2**30, 0.1
# KV tokens without which a server is of no use.
LEAST_TOKENS = 4096
# Query heads to a KV head from which on SGLang decodes by a prefill kernel.
TENSOR_CORE_GROUP = 4
HOPPER = 9


@dataclass(frozen=True)
class Memory:
    """bytes: of a card, or free on a CPU. num_cards: 0 for a CPU, where weights and KV
    are 32-bit."""

    bytes: int
    num_cards: int = 0

    @property
    def itemsize(self) -> int:
        return 2 if self.num_cards else 4

    @property
    def room(self) -> float:
        """Bytes for weights and KV."""
        if not self.num_cards:
            return self.bytes
        share = RESERVED_SHARE * self.bytes
        return self.bytes - (RESERVED if self.bytes > LARGE_CARD else share)


def read_config(path: str) -> dict[str, Any] | None:
    """Of a model's folder; None of a hub model and where it cannot be read."""
    try:
        text = (Path(path) / "config.json").read_text(encoding="utf-8")
        config: dict[str, Any] = json.loads(text)
        return config.get("text_config") or config
    except (OSError, ValueError, AttributeError):
        return None


def flashinfer_modules(path: str, capability: int) -> list[str]:
    """Names of the attention modules that FlashInfer needs for a model.

    capability: major compute capability of the card; prompts have a kernel of their own
    on Hopper.
    """
    import torch
    from flashinfer.jit.attention import modules

    config = read_config(path)
    if config is None:
        return []
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    named = config.get("dtype") or config.get("torch_dtype")
    dtype = torch.float16 if named == "float16" else torch.bfloat16
    common = (dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False)
    prefill = modules.get_batch_prefill_uri
    found = [prefill("fa2", *common, False)]
    if heads // kv_heads < TENSOR_CORE_GROUP:
        found.append(modules.get_batch_decode_uri(*common))
    if capability == HOPPER:
        found.append(prefill("fa3", *common, False))
    return found


def is_built(module: str) -> bool:
    """Whether FlashInfer has the module, compiled here or from a package."""
    from flashinfer.jit import env

    compiled = env.FLASHINFER_JIT_DIR / module / f"{module}.so"
    return compiled.exists() or bool(env.get_aot_artifacts(module))


def compiler() -> str:
    """Path of nvcc as FlashInfer looks for it, "" without one."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    places = [os.environ.get("FLASHINFER_NVCC") or ""]
    places += [f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda") if home]
    found = next((p for p in places if p and shutil.which(p)), "")
    return found or shutil.which("nvcc") or ""


def kernels_sentence(paths: Sequence[str], capability: int) -> str:
    """What FlashInfer compiles at first. Raises ValueError where it cannot."""
    modules = {m for path in paths for m in flashinfer_modules(path, capability)}
    missing = sorted(m for m in modules if not is_built(m))
    if not modules:
        return "FlashInfer's kernels not checked: no config.json of the pair here"
    if not missing:
        return f"FlashInfer has all {len(modules)} attention modules of the pair"
    nvcc, ninja = compiler(), shutil.which("ninja") or ""
    what = f"{len(missing)} attention modules ({', '.join(missing)})"
    if lacking := [n for n, at in (("nvcc", nvcc), ("ninja", ninja)) if not at]:
        raise ValueError(
            f"FlashInfer has to compile {what} and finds no "
            f"{' and no '.join(lacking)}; install the CUDA toolkit "
            "and ninja, or the package flashinfer-jit-cache."
        )
    return (
        f"FlashInfer compiles {what} at the first start, which takes minutes, with "
        f"{nvcc} and {ninja}"
    )


def weight_bytes(path: str, shape: ModelShape, itemsize: int) -> float:
    """Of a model's files; by its shape where there are none."""
    sizes = [f.stat().st_size for f in Path(path).glob("*.safetensors")]
    return sum(sizes) or shape.weight_bytes * itemsize / 2


def memory_sentence(target: str, draft: str, memory: Memory, context: int) -> str:
    """How many tokens of KV fit beside the weights. Raises ValueError where too few do.

    context: longest text of a request, 0 where it is not known.
    """
    if read_config(target) is None or read_config(draft) is None:
        return "memory of the pair not checked: no config.json of both models here"
    shapes = [(path, ModelShape.find(path)) for path in (target, draft)]
    weights = sum(weight_bytes(p, s, memory.itemsize) for p, s in shapes)
    per_token = sum(s.kv_bytes for _, s in shapes) * memory.itemsize / 2
    told = f"the pair's weights take {weights / 1e9:.2f} GB"
    tp = 1
    while True:
        tokens = int((tp * memory.room - weights) / per_token)
        if tokens >= LEAST_TOKENS:
            break
        if 2 * tp > memory.num_cards:
            where = f"{tp} x {memory.bytes / 1e9:.1f} GB"
            raise ValueError(
                f"{told} of {where}, which leaves KV for {max(0, tokens)} tokens, "
                f"expected {LEAST_TOKENS} or more; use more GPUs (--tp) or a smaller "
                "or quantised pair."
            )
        tp *= 2
    cards = f" with --tp {tp}" if tp > 1 else ""
    fits = "" if tokens >= context else f", less than one request of {context}"
    return f"{told} and leave KV for about {tokens} tokens{cards}{fits}"
