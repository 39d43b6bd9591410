"""The draft model in its own token space, with a KV pool of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_parse.drafting.draft_model import DraftModel
from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.sgl.own_rows import OwnRows

# Slots of its pool for each slot of the target's: its tokens may be shorter.
SLOTS_PER_TOKEN = 1.3


class TextModel(DraftModel):
    """Its rows and slots are not the target's, and neither are its ids."""

    def __init__(self, context: DrafterContext, tokenizer: Any) -> None:
        """tokenizer: the draft's."""
        super().__init__(context, vocab_size=len(tokenizer), context_len=None)
        self.row_width = min(self.reach, 2 * context.context_len)
        ends = self.runner.model_config.hf_eos_token_id or ()
        found = {*ends, tokenizer.eos_token_id}
        #: Tokens that end its answers.
        self.stop_ids = frozenset(i for i in found if i is not None)

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        """kwargs: as for the target, whose pool of rows has as many."""
        memory_pool_config = kwargs["memory_pool_config"]
        pool = ReqToTokenPool(
            size=kwargs["req_to_token_pool"].size,
            max_context_len=self.row_width,
            device=self.runner.device,
            enable_memory_saver=False,
        )
        num_slots = int(SLOTS_PER_TOKEN * memory_pool_config.max_total_num_tokens)
        super().alloc_memory_pool(
            memory_pool_config=dataclasses.replace(
                memory_pool_config, max_total_num_tokens=num_slots
            ),
            req_to_token_pool=pool,
        )
        self.rows = OwnRows(pool, self.runner.token_to_kv_pool_allocator)
