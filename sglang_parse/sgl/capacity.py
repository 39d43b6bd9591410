"""How many rows a forward may have, and what the KV pools hold."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_exec, get_schedule

from sglang_parse.sgl.architecture import has_recurrent_state

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class StateCosts:
    """Bytes of the recurrent state of a model, over all its layers."""

    #: Of one request, or of one cached prefix.
    slot: int
    #: What a pass keeps of a drafted row until its tokens are decided.
    row: int
    #: What a judge suffix takes while one layer runs.
    branch: int

    @classmethod
    def of(cls, pool: Any, itemsize: int) -> StateCosts:
        """pool: SGLang's MambaPool (mem_cache/memory_pool.py). itemsize: of an element
        of the model's activations."""
        conv, delta = pool.mamba_cache.conv[0], pool.mamba_cache.temporal
        num_layers, _, width, _ = conv.shape
        branch = conv[0, 0].nbytes + delta[0, 0].nbytes
        # Inputs of the convolution, and two numbers for each head's gates.
        row = num_layers * (width + 2 * delta.shape[2]) * itemsize
        return cls(num_layers * branch, row, branch)

    def most_rows(self, most: int, free_bytes: int) -> int:
        """Rows of a pass, at most `most`, whose inputs and branches fit; each row is
        counted as a drafted one, and half of what is free is left to activations."""
        return max(2, min(most, free_bytes // (2 * self.row)))

    def describe(self, *, num_slots: int, max_rows: int) -> str:
        return (
            f"Recurrent state: {num_slots} slots of {self.slot} bytes, "
            f"{num_slots * self.slot / 1e9:.2f} GB, for requests and cached prefixes. "
            f"A pass has at most {max_rows} rows: it keeps {self.row} bytes of each "
            "drafted one until its tokens are decided, "
            f"{max_rows * self.row / 1e9:.2f} GB, and each judge suffix takes "
            f"{self.branch} bytes while a layer runs."
        )


def pass_rows(runner: Any, req_to_token_pool: Any, free_bytes: int) -> int:
    """Rows of the longest pass of a target; fewer where its recurrent state needs the
    memory, which is told. free_bytes: left beside weights and pools."""
    rows = longest_pass()
    if has_recurrent_state(runner):
        pool = req_to_token_pool.mamba_pool
        costs = StateCosts.of(pool, runner.dtype.itemsize)
        rows = costs.most_rows(rows, free_bytes)
        logger.info(costs.describe(num_slots=pool.size, max_rows=rows))
    return rows


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
