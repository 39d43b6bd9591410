"""KV of slots that is spoiled as they are freed, so that reading it shows."""

from __future__ import annotations


def poison(worker) -> None:
    """Spoil it in the pools of all models. worker: a ParseWorker whose pools exist."""
    runners = (worker._target_runner, *worker._draft_model_runners())
    pools = [runner.token_to_kv_pool for runner in runners]
    buffers = [b for pool in pools for b in (*pool.k_buffer, *pool.v_buffer)]
    allocator = runners[0].token_to_kv_pool_allocator
    free = allocator.free

    def free_poisoned(slots):
        for buffer in buffers:
            buffer[slots] = 1e3  # no NaN: columns that a mask hides count for nothing
        free(slots)

    allocator.free = free_poisoned
