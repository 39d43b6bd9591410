"""What the KV pools of models that draft add to SGLang's memory budget."""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.runtime_context import get_model, get_parallel, get_spec

from sglang_parse.drafting.create_drafters import models_of
from sglang_parse.drafting.text_model import SLOTS_PER_TOKEN
from sglang_parse.drafting.vocabularies import match_of
from sglang_parse.plugin.flags import config_from_server_args
from sglang_parse.sgl.compat.model_changes import loaded_as_it_is


def add_draft_cell_size(cell_size: int, configurator: Any, kvc: Any, *_: Any) -> int:
    """AFTER hook on DefaultPoolConfigurator._compute_cell_size; bytes per token.

    The pools of the draft model and the target's head have one slot per target slot,
    and that of a draft with its own tokenizer has more. SGLang budgets them for
    built-in algorithms only (pool_configurator.py).
    """
    server_args = kvc.server_args
    if kvc.is_draft_worker:
        return cell_size
    config = config_from_server_args(server_args)
    of_draft = config.draft_eagle_model_path
    for path, revision, is_head in models_of(server_args, config):
        added = draft_cell_size(server_args, path, revision, is_head=is_head)
        if (
            path in (server_args.speculative_draft_model_path, of_draft)
            and not match_of(server_args).shares_ids
        ):
            added = math.ceil(SLOTS_PER_TOKEN * added)
        cell_size += added
    return cell_size


def draft_cell_size(
    server_args: Any, path: str, revision: str | None, *, is_head: bool
) -> int:
    """Bytes per token of the KV of a model that drafts, on one rank: all layers."""
    with loaded_as_it_is(is_head=is_head):
        config = ModelConfig.from_server_args(
            server_args, model_path=path, model_revision=revision, is_draft_model=True
        )
    heads = config.get_num_kv_heads(get_parallel().attn_tp_size)
    width = config.head_dim + getattr(config, "v_head_dim", config.head_dim)
    if config.attention_arch == AttentionArch.MLA:
        heads, width = 1, config.kv_lora_rank + config.qk_rope_head_dim
    # A head in the target's checkpoint has the target's config.
    layers = config.num_nextn_predict_layers or config.num_hidden_layers
    return layers * heads * width * draft_kv_dtype(config.dtype).itemsize


def draft_kv_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Element type of the draft's pool, as its own runner resolves it.

    model_dtype: of the draft's weights. A checkpoint that asks for fp8 KV itself gets
    it in the pool but is budgeted at model_dtype, which is more.
    Source: sglang/srt/model_executor/model_runner.py, `configure_kv_cache_dtype`.
    """
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
