"""Changes to SGLang's pools of KV slots, on the device and in host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor


def tell_of_slots(allocator: Any, note: Callable[[Tensor], None]) -> None:
    """Have `note` told of all slots that are taken from a pool.

    What: the allocator's functions that take slots tell of them.
    Why: a hierarchical cache brings KV back into slots that no batch names as its own,
    and what a drafter knows of those slots is of the tokens before.
    Where: mem_cache/hybrid_cache/hybrid_cache_controller.py, `load`.
    Ends with: a call of the speculative worker for prefixes that are brought back.
    """

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def alloc(*args: Any, **kwargs: Any) -> Any:
            slots = original(*args, **kwargs)
            if slots is not None:
                note(slots)
            return slots

        return alloc

    for name in ("alloc", "alloc_extend", "alloc_decode"):
        original = getattr(allocator, name, None)
        if original is not None:
            setattr(allocator, name, telling(original))


def keep_on_cpu(
    allocate: Callable[..., Tensor], copy: Callable[..., None], reserve: int
) -> None:
    """Let a hierarchical cache keep its prompts beside a model on the CPU.

    What: host pools take memory by `allocate`, leave `reserve` bytes free, and copy
    slots by `copy`.
    Why: they make memory known to a GPU, copy with its kernel, and leave 10 GiB to a
    host that has other work.
    Where: mem_cache/pool_host/common.py, `alloc_with_host_register`;
    mem_cache/pool_host/base.py, `host_memory_budget_bytes`;
    mem_cache/pool_host/mha.py and mla.py, `load_to_device_per_layer`.
    Ends with: a host pool for platforms without a device of their own.
    """
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = reserve
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    mha.transfer_kv_direct = mla.transfer_kv_direct = copy
