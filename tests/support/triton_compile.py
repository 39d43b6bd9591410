"""Compiles Triton kernels for sm_90 without a card. Run by test_triton_sm90.py in a
process of its own; prints one line of JSON: target and bytes of code by kernel."""

import json
import sys
from typing import Any

import triton
from sglang.kernels.ops.attention import extend_attention, kv_indices
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
HEAD_DIM = 128


def build(kernel: Any, kinds: dict[str, str], values: dict[str, Any], **options: Any):
    """kinds: Triton's type of each argument that is no i32. values: of constants."""
    while not hasattr(kernel, "params"):  # behind heuristics
        kernel = kernel.fn
    constants = dict(values)
    for param in kernel.params:
        if param.name in constants or param.name in kinds:
            continue
        if param.has_default:
            constants[param.name] = param.default
    known = [p.name for p in kernel.params]
    signature = {
        n: "constexpr" if n in constants else kinds.get(n, "i32") for n in known
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={n: v for n, v in constants.items() if n in known},
    )
    code = triton.compile(source, target=HOPPER, options=options).asm
    lines = code["ptx"].splitlines()
    target = next(line for line in lines if line.startswith(".target"))
    return {"target": target, "bytes": len(code["cubin"])}


def columns() -> dict[str, Any]:
    """Columns of virtual sequences out of the requests' rows."""
    kinds = dict.fromkeys(("req_to_token_ptr", "kv_indptr", "kv_indices_ptr"), "*i32")
    kinds |= dict.fromkeys(("req_pool_indices_ptr", "page_kernel_lens_ptr"), "*i64")
    return build(
        kv_indices.create_flashinfer_kv_indices_triton, kinds, {"kv_start_idx": None}
    )


def attention() -> dict[str, Any]:
    """Attention of a pass in bfloat16, as for a dense model with heads of 128."""
    tensors = ("Q_Extend", "K_Extend", "V_Extend", "O_Extend", "K_Buffer", "V_Buffer")
    kinds = dict.fromkeys(tensors, "*bf16")
    kinds |= {"qo_indptr": "*i64", "kv_indptr": "*i32", "kv_indices": "*i64"}
    kinds |= dict.fromkeys(("sm_scale", "k_scale", "v_scale"), "fp32")
    none = ("LSE_Extend", "mask_ptr", "mask_indptr", "sink_ptr", "window_kv_offset_ptr")
    off = (
        *("USE_CUSTOM_MASK", "SKIP_PREFIX_CUSTOM_MASK", "STORE_LSE", "SKIP_PREFIX"),
        *("SKIP_EXTEND", "STORE_TRANSPOSE", "HAS_SINK", "USE_COMPACT_TILE_GRID"),
        *("USE_EXP2", "USE_FP8_PREFIX", "USE_FP8_EXTEND"),
    )
    return build(
        extend_attention._fwd_kernel,
        kinds,
        {
            **dict.fromkeys(none, None),
            **dict.fromkeys(off, False),
            "IS_CAUSAL": True,
            "SLIDING_WINDOW_SIZE": -1,
            "logit_cap": 0.0,
            "xai_temperature_len": -1,
            "Lq": HEAD_DIM,
            "Lv": HEAD_DIM,
            "BLOCK_DMODEL": HEAD_DIM,
            "BLOCK_DPE": 0,
            "BLOCK_DV": HEAD_DIM,
            "BLOCK_M": 128,
            "BLOCK_N": 64,
            "BLOCK_N_PREFIX": 64,
            "FP8_MAX": 448.0,
        },
        num_warps=8,
        num_stages=1,
    )


if __name__ == "__main__":
    found = {"columns of a pass": columns(), "attention of a pass": attention()}
    sys.stdout.write(json.dumps(found) + "\n")
