"""How many rows a forward may have, and what the KV pools hold."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_exec, get_schedule

# SGLang leaves memory beside its pools for the activations of a prefill of at least so
# many tokens (arg_groups/memory_hook.py).
LEAST_PREFILL = 2048


def longest_prefill() -> int:
    """Tokens of the longest prefill, as SGLang resolved them; its ServerArgs keep
    what the user gave."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size or 0
    return chunk if chunk > 0 else int(schedule.max_prefill_tokens)


def longest_pass() -> int:
    """Rows of the longest verify pass: its activations take what those of a prefill
    take, for which SGLang leaves memory."""
    features = get_exec().features
    # SGLang's buffer for routed experts has rows for its own prefills alone.
    least = 0 if features.enable_return_routed_experts else LEAST_PREFILL
    return max(least, longest_prefill())


def check_feature_room(
    *, num_rows: int, width: int, itemsize: int, free_bytes: int, compose: str
) -> None:
    """Raise ValueError where the hidden states of one prefill would not fit.

    num_rows: of the largest prefill, whose [rows, width] hidden states a head reads;
    they exist twice while they are put side by side. free_bytes: left beside weights
    and pools. compose: the setting.
    """
    wanted = 2 * num_rows * width * itemsize
    if wanted > free_bytes:
        raise ValueError(
            f"--speculative-parse-compose {compose} needs {wanted / 1e9:.2f} GB for "
            f"the hidden states of a prefill of {num_rows} tokens and "
            f"{free_bytes / 1e9:.2f} GB are free; lower --chunked-prefill-size or "
            "--mem-fraction-static."
        )


def bytes_per_token(pool: Any) -> int:
    """Bytes of K and V that one token takes in a KV pool, as allocated; with a pool of
    its own for sliding windows, on the average. Latent KV is one tensor."""
    size = pool.get_kv_size_bytes()
    total = sum(size) if isinstance(size, tuple) else size
    return int(total // (pool.size + pool.page_size))
