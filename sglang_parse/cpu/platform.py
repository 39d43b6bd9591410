"""Torch-native CPU platform for stock SGLang.

It serves any decoder-only model that has plain torch forwards, with SGLang's own
scheduler, radix cache and HTTP server, where there is no accelerator.
`entry.py` decides when.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import psutil
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch.profiler import ProfilerActivity

from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND, is_parse

# Pool default where the user gives none: a host with hundreds of GiB must not hand
# half of them to the KV cache of a test model.
DEFAULT_MAX_TOTAL_TOKENS = 65536


def _stock_cpu_backend() -> str:
    """What SGLang has put into an unset `attention_backend` by the time it asks us.

    Source: sglang/srt/arg_groups/platform_hook.py, `handle_cpu_backends`.
    """
    from sglang.srt.utils import is_host_cpu_arm64

    return "torch_native" if is_host_cpu_arm64() else "intel_amx"


def _prepare_ranks(num_ranks: int) -> None:
    """Environment of tensor-parallel ranks, which are processes yet to start."""
    from sglang.srt.utils.common import get_cpu_ids_by_node

    if num_ranks == 1:
        return
    # The sharded embedding is compiled otherwise, by each rank at its first token
    # (sglang/srt/layers/vocab_parallel_embedding.py), with the C++ compiler on CPU.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    binding = share_cores(
        num_ranks, len(get_cpu_ids_by_node()), psutil.Process().cpu_affinity()
    )
    if binding is not None:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)


def share_cores(num_ranks: int, num_nodes: int, cores: Sequence[int]) -> str | None:
    """Value of SGLang's binding variable that gives every rank cores of this process.

    None where SGLang serves anyway: by itself it gives each rank a NUMA node and
    refuses more ranks than there are (sglang/srt/utils/numa_utils.py).
    """
    if num_ranks <= num_nodes:
        return None
    shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


class ParseCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Device "cpu", out of tree: no Triton, no graphs, no sgl_kernel operators."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return CPU_ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"  # `/start_profile` of an out-of-tree platform asks for these

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill what the user left open; refuse nothing here."""
        server_args.device = "cpu"
        if server_args.attention_backend in (None, _stock_cpu_backend()):
            server_args.attention_backend = CPU_ATTENTION_BACKEND
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 32
        if server_args.page_size is None:
            server_args.page_size = 1
        # Of the ways to copy KV to a hierarchical cache, the one without a kernel.
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "layer_first"
        server_args.sampling_backend = "pytorch"
        if server_args.moe_runner_backend == "auto":
            # Experts run in plain torch; SGLang would lay out gpt-oss's for a kernel.
            server_args.moe_runner_backend = "triton"
        # The idle scheduler loop would take a core from the servers beside it.
        server_args.sleep_on_idle = True
        server_args.disable_overlap_schedule = True
        server_args.cuda_graph_backend_decode = "disabled"
        server_args.cuda_graph_backend_prefill = "disabled"
        _prepare_ranks(server_args.tp_size * server_args.dp_size)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from sglang_parse.cpu.ops import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return is_parse(algorithm)
