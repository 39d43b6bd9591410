"""Route `rows`: the virtual sequences as rows of a slot table of the pass's own, for
backends that find a sequence's slots in its row of req_to_token and nowhere else.

Such a backend prefills after a cached prefix: the row holds the slots of the prefix,
then those of the sequence's own tokens. A judge suffix has no row of req_to_token, so
the pass brings a table with a row for each sequence. No row of SGLang's pool is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_parse.sgl.names import STOCK_TORCH
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.backends.verify_backend import VerifyBackend
from sglang_parse.verify.backends.virtual import ExtendVerifyInput, virtual_slots
from sglang_parse.verify.layout import VerifyPlan


class RowsVerifyInput(ExtendVerifyInput):
    """The virtual sequences as a batch of extends whose rows are those of `table`."""

    def __init__(
        self, plan: VerifyPlan, slots: list[Tensor], logits_rows: Tensor
    ) -> None:
        super().__init__(plan, slots, logits_rows)
        taken = virtual_slots(self.sequences, plan, slots)
        self.table = table_of(taken, self.sequences.kv_lens)

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        assert self.table is not None
        rows = torch.arange(len(self.table), device=req_pool_indices.device)
        fields = super().batch_fields(req_pool_indices)
        return {**fields, "req_pool_indices": rows}


def table_of(slots: Tensor, lens: tuple[int, ...]) -> Tensor:
    """[sequences, longest] int32: a row for each sequence, slot 0 after its end.

    slots: [sum(lens)] int64, one sequence after another.
    """
    ends = torch.tensor(lens)
    columns = torch.arange(max(lens))
    is_taken = upload(columns < ends[:, None], slots.device)
    table = torch.zeros(is_taken.shape, dtype=torch.int32, device=slots.device)
    return table.masked_scatter_(is_taken, slots.to(torch.int32))


#: FlashAttention 3 reads whole pages of a row (flashattention_backend.py,
#: `init_forward_metadata`), and a suffix may begin inside one.
FA3 = VerifyBackend("fa3", {"rows": RowsVerifyInput}, max_page_size=1)
TORCH_NATIVE = VerifyBackend(STOCK_TORCH, {"rows": RowsVerifyInput})
