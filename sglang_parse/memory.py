"""KV slots and KV budget: the one place that touches SGLang's allocators.

PARSE takes the slots of a round inside the round (it runs without overlap), so the
scheduler's own per-round reserve stays at a few tokens and a short pool makes the
draft shorter instead of retracting requests. Draft tokens live in the request's row
of `req_to_token`, right behind the committed tokens; suffix tokens live in scratch
slots that no row names and that are freed before the round returns, so the radix
cache can never hold them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import (
    alloc_token_slots,
    assign_req_to_token_pool_func,
)
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_exec, get_schedule
from torch import Tensor

logger = logging.getLogger(__name__)


def add_draft_cell_size(cell_size: int, configurator: Any, kvc: Any, *_: Any) -> int:
    """AFTER hook on DefaultPoolConfigurator._compute_cell_size: add what drafts.

    The pools of the draft model and the EAGLE-3 head have one slot per target slot
    (shared allocator) and SGLang budgets them for built-in algorithms only
    (pool_configurator.py). Returns bytes per token.
    """
    from sglang_parse.algorithm import ParseAlgorithm
    from sglang_parse.flags import config_from_server_args

    server_args = kvc.server_args
    if kvc.is_draft_worker or not isinstance(kvc.spec_algorithm, ParseAlgorithm):
        return cell_size
    config = config_from_server_args(server_args)
    for path, revision in (
        (
            server_args.speculative_draft_model_path,
            server_args.speculative_draft_model_revision,
        ),
        (config.eagle_model_path, None),
    ):
        if path:
            cell_size += draft_cell_size(server_args, path, revision)
    return cell_size


def draft_cell_size(server_args: Any, path: str, revision: str | None) -> int:
    """Bytes per token of the KV of a model that drafts, on one rank: all layers."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_parallel

    config = ModelConfig.from_server_args(
        server_args, model_path=path, model_revision=revision, is_draft_model=True
    )
    heads = config.get_num_kv_heads(get_parallel().attn_tp_size)
    width = config.head_dim + getattr(config, "v_head_dim", config.head_dim)
    itemsize = torch._utils._element_size(draft_kv_dtype(config.dtype))
    return config.num_hidden_layers * heads * width * itemsize


def draft_kv_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Element type of the draft's pool, as its own runner resolves it.

    model_dtype: of the draft's weights. A checkpoint that asks for fp8 KV itself gets
    it in the pool but is budgeted at model_dtype, which is more.
    Source: sglang/srt/model_executor/model_runner.py, `configure_kv_cache_dtype`.
    """
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.runtime_context import get_model, get_spec

    spec = get_spec()
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=model_dtype,
        is_draft_worker=True,
        is_dflash=False,
        speculative_draft_attention_backend=spec.speculative_draft_attention_backend,
        speculative_draft_kv_cache_dtype=spec.speculative_draft_kv_cache_dtype,
    )
    return dtype


def bytes_per_token(pool: Any) -> int:
    """Bytes of K and V that one token takes in a KV pool, as allocated."""
    k_bytes, v_bytes = pool.get_kv_size_bytes()
    return (k_bytes + v_bytes) // (pool.size + pool.page_size)


def describe_pools(
    *,
    target_pool: Any,
    draft_pools: Sequence[Any],
    window: int,
    max_judge_tokens: int,
) -> str:
    """What the KV pools hold and what PARSE takes of them, in one line.

    draft_pools: of the draft model and the EAGLE-3 head, where there are. window: draft
    tokens a round, 0 for no limit. max_judge_tokens: suffix tokens a request may have
    judged in one pass.
    """
    target_bytes = bytes_per_token(target_pool)
    draft_bytes = sum(map(bytes_per_token, draft_pools))
    total = target_pool.size * (target_bytes + draft_bytes) / 1e9
    drafted = f"up to {window} slots" if window else "slots for its whole response"
    return (
        f"KV pools: {target_pool.size} tokens of {target_bytes} bytes for the target "
        f"and {draft_bytes} for what drafts, {total:.2f} GB. In a round a request "
        f"takes {drafted} to draft and up to {max_judge_tokens} for judge suffixes, "
        f"which go back after the pass; between rounds it holds "
        f"{get_alloc_reserve_per_decode()} spare ones."
    )


def check_feature_room(
    *, num_prefill: int, num_verify: int, width: int, itemsize: int, free_bytes: int
) -> None:
    """Raise ValueError where the hidden states of one prefill would not fit, and warn
    where those of a verify pass might not.

    num_prefill, num_verify: rows of the largest prefill and of a full verify pass,
    whose [rows, width] hidden states an EAGLE-3 head reads; they exist twice while they
    are put side by side. free_bytes: left beside weights and pools.
    """
    for num_rows, what in ((num_prefill, "prefill"), (num_verify, "verify pass")):
        wanted = 2 * num_rows * width * itemsize
        if wanted <= free_bytes:
            continue
        needs = (
            f"--speculative-parse-compose eagle3 needs {wanted / 1e9:.2f} GB for the "
            f"hidden states of a {what} of {num_rows} tokens and "
            f"{free_bytes / 1e9:.2f} GB are free; lower"
        )
        if what == "prefill":
            raise ValueError(
                f"{needs} --chunked-prefill-size or --mem-fraction-static."
            )
        # Every request with a whole window at once: it may never come to that.
        logger.warning(
            "%s --max-running-requests, --speculative-parse-window or "
            "--mem-fraction-static.",
            needs,
        )


def full_pass_rows(
    *, num_requests: int, window: int, max_judge_tokens: int, most: int
) -> int:
    """Rows of a verify pass in which every request has a bonus token, a whole draft and
    all its suffixes (arguments as for `describe_pools`), at most `most`; without a
    window, of one request that drafts alone."""
    if not window:
        num_requests, window = 1, most
    return min(num_requests * (1 + window + max_judge_tokens), most)


# SGLang leaves memory beside its pools for the activations of a prefill of at least so
# many tokens (arg_groups/memory_hook.py).
LEAST_PREFILL = 2048


def longest_prefill() -> int:
    """Tokens of the longest prefill, as SGLang resolved them; its record keeps what
    was asked for."""
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


class RoundSlots:
    """Slots of one round over SGLang's shared pool.

    max_rows: of a verify pass (longest_pass).
    """

    def __init__(self, req_to_token_pool: Any, allocator: Any, max_rows: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.max_rows = max_rows

    @property
    def table(self) -> Tensor:
        """[num_rows, row_width] int32, the slot of every column of every request."""
        return self.req_to_token_pool.req_to_token

    def num_free(self, tree_cache: Any) -> int:
        """Slots obtainable now, evicting cached prefixes if need be."""
        return self.allocator.available_size() + tree_cache.evictable_size()

    def extend_rows(self, batch: Any, lens: Sequence[int]) -> None:
        """Give each request slots for columns [0, lens[i]); never shrinks a row."""
        current = [r.kv.kv_allocated_len for r in batch.reqs]
        wanted = [max(c, n) for c, n in zip(current, lens, strict=True)]
        # SGLang's writer does not look where a row ends (allocation.py).
        assert max(wanted) <= self.table.shape[1], (wanted, self.table.shape)
        num_new = sum(wanted) - sum(current)
        if num_new == 0:
            return
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            self.table,
            torch.tensor(current, dtype=torch.int32).to(batch.device),
            torch.tensor(wanted, dtype=torch.int32).to(batch.device),
            alloc_token_slots(batch.tree_cache, num_new),
            len(current),
        )
        for req, n in zip(batch.reqs, wanted, strict=True):
            req.kv.kv_allocated_len = n

    def trim_rows(self, batch: Any, lens: Sequence[int]) -> None:
        """Free the columns past lens[i] that the scheduler would not reserve anyway."""
        reserve = get_alloc_reserve_per_decode()
        freed = []
        rows = batch.req_pool_indices.tolist()
        for req, row, n in zip(batch.reqs, rows, lens, strict=True):
            keep = n + reserve
            if req.kv.kv_allocated_len > keep:
                freed.append(self.table[row, keep : req.kv.kv_allocated_len])
                req.kv.kv_allocated_len = keep
        if freed:
            self.allocator.free(torch.cat(freed).to(torch.int64))

    def take_scratch(self, tree_cache: Any, num_slots: int) -> Tensor:
        """[num_slots] int64 scratch slots; give them back with `release_scratch`."""
        if num_slots == 0:
            return torch.empty(0, dtype=torch.int64, device=self.table.device)
        return alloc_token_slots(tree_cache, num_slots).to(torch.int64)

    def release_scratch(self, slots: Tensor) -> None:
        if slots.numel():
            self.allocator.free(slots)
