"""Compiles Triton kernels for sm_90 and sm_100 without a card. Run by
test_triton_targets.py in a process of its own; prints one line of JSON: target and
bytes of code by architecture, use and kernel.

SGLang's own functions launch the kernels with the tensors that PARSE's passes and steps
have; a launch compiles instead of running, so that types and constants are SGLang's.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from sglang.kernels.ops.attention import (
    decode_attention,
    extend_attention,
    kv_indices,
    metadata,
)
from sglang.kernels.ops.grammar import bitmask_ops
from sglang.srt.mem_cache import allocation
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHES = (90, 100)
TYPES = {
    **{torch.bfloat16: "bf16", torch.float32: "fp32", torch.bool: "i1"},
    **{torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"},
}
SPLITS, SEQS, SLOTS = 8, 4, 64
found: dict[str, dict[str, Any]] = {}


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def launch(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
    """Stands for JITFunction.run."""
    names = [p.name for p in self.params]
    values = {p.name: p.default for p in self.params if p.has_default}
    values |= dict(zip(names, args, strict=False))
    values |= {n: v for n, v in more.items() if n in names}
    options = {n: v for n, v in more.items() if n not in names}
    constants = {
        p.name: values[p.name]
        for p in self.params
        if p.is_constexpr or values[p.name] is None
    }
    signature = {
        n: "constexpr" if n in constants else type_of(values[n]) for n in names
    }
    source = ASTSource(fn=self, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", arch, 32)
    code = triton.compile(source, target=target, options=options).asm
    lines = code["ptx"].splitlines()
    found[f"sm_{arch} {work.__name__} {self.__name__}"] = {
        "target": next(line for line in lines if line.startswith(".target")),
        "bytes": len(code["cubin"]),
    }


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return some(*shape, dtype=torch.int32)


def columns() -> None:
    """Columns of virtual sequences out of the requests' rows, and their slots."""
    rows = some(SEQS, dtype=torch.int64)
    table = ints(SEQS, SLOTS)
    kv_indices.create_flashinfer_kv_indices_triton[(SEQS,)](
        table, rows, rows, ints(SEQS + 1), None, ints(SLOTS), table.stride(0)
    )
    allocation.assign_req_to_token_pool_func(rows, table, rows, rows, rows, SEQS)


def passes() -> None:
    """Attention of a pass over a dense model, with a window, and in latent space."""
    for heads, kv_heads, dim, value_dim, window in (
        (8, 2, 128, 128, -1),
        (8, 2, 128, 128, 127),
        (16, 1, 576, 512, -1),
    ):
        extend_attention.extend_attention_fwd(
            some(SLOTS, heads, dim),
            some(SLOTS, kv_heads, dim),
            some(SLOTS, kv_heads, value_dim),
            some(SLOTS, heads, value_dim),
            some(SLOTS, kv_heads, dim),
            some(SLOTS, kv_heads, value_dim),
            some(SEQS + 1, dtype=torch.int64),
            ints(SEQS + 1),
            some(SLOTS, dtype=torch.int64),
            None,
            True,
            None,
            SLOTS,
            1.0,
            1.0,
            sm_scale=0.1,
            sliding_window_size=window,
        )


def steps(heads: int, kv_heads: int, dim: int, value_dim: int) -> None:
    """Attention of a decode step or a short pass."""
    metadata.get_num_kv_splits_triton[(1,)](
        *(ints(SEQS), some(SEQS, dtype=torch.int64), SEQS, 1, heads, kv_heads),
        *(SPLITS, 132),
        MAX_NUM_SEQ=SEQS,
        uneven_batch_ptr=None,
    )
    decode_attention.decode_attention_fwd(
        some(SEQS, heads, dim),
        some(SLOTS, kv_heads, dim),
        some(SLOTS, kv_heads, value_dim),
        some(SEQS, heads, value_dim),
        ints(SEQS + 1),
        some(SLOTS, dtype=torch.int64),
        some(SEQS, heads, SPLITS, value_dim, dtype=torch.float32),
        some(SEQS, heads, SPLITS, dtype=torch.float32),
        ints(SEQS),
        SPLITS,
        0.1,
        1.0,
        1.0,
        has_mla=dim != value_dim,
    )


def steps_of_single_heads() -> None:
    steps(8, 8, 128, 128)


def steps_of_groups() -> None:
    steps(8, 2, 128, 128)


def steps_of_latent_attention() -> None:
    steps(16, 1, 576, 512)


def grammars() -> None:
    """Masks of a draft step and of sampled rows."""
    logits = some(SEQS, 4096, dtype=torch.float32)
    bitmask_ops.apply_token_bitmask_inplace_triton(logits, ints(SEQS, 128))


WORKS = (
    *(columns, passes, steps_of_single_heads, steps_of_groups),
    *(steps_of_latent_attention, grammars),
)
work: Callable[[], None] = columns
arch = ARCHES[0]

if __name__ == "__main__":
    triton.runtime.jit.JITFunction.run = launch
    allocation._is_cpu = False
    extend_attention._is_cuda = True
    bitmask_ops.get_device_core_count = lambda *_: 132
    decode_attention.get_device_core_count = lambda *_: 132
    for arch in ARCHES:
        extend_attention.CUDA_CAPABILITY = (arch // 10, 0)
        for work in WORKS:
            work()
    sys.stdout.write(json.dumps(found) + "\n")
