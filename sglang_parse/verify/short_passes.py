"""Passes without verdicts, as captured decode steps with one row for each token.

A layer writes the KV of all rows before it attends. So the rows of a draft may be
sequences of their own in a decode step: each reads its request's row of `req_to_token`
up to its own place. A captured step then replays all of the pass, where a prefill graph
leaves the attention of each layer to the host.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.capacity import bytes_per_token
from sglang_parse.sgl.fast_paths import TARGET_STEPS
from sglang_parse.sgl.forward_batches import mrope_shifts
from sglang_parse.sgl.slots import RoundSlots
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.layout import VerifyPlan
from sglang_parse.verify.output import PassOutput
from sglang_parse.verify.passes import TargetVerifier

# Each row reads the whole context once more. On an H200 a pass of a few rows took 2 ms
# longer than a decode step (docs/results/gpu.md), in which it reads 8 GB.
MOST_READ = 2 << 30


class ShortPasses:
    """Runs short passes of `verifier` over the rows of `slots`."""

    def __init__(self, verifier: TargetVerifier, slots: RoundSlots) -> None:
        self.verifier = verifier
        self.slots = slots
        self._token_bytes = 0

    @property
    def most_rows(self) -> int:
        """Of a pass, 0 where decode steps are not captured."""
        if not self.verifier.paths.is_on(TARGET_STEPS):
            return 0
        return int(getattr(self._graphs, "max_bs", 0))

    @property
    def _graphs(self) -> Any:
        return getattr(self.verifier.runner, "decode_cuda_graph_runner", None)

    def fits(self, round: Round, plan: VerifyPlan) -> bool:
        """Whether the pass is a chain of tokens after each context, and short."""
        if not self.most_rows or any(plan.boundaries):
            return False
        if not self._captures(plan.num_verify_tokens):
            return False
        if round.batch.return_hidden_states:
            return False
        if not self._shows_enough(round):
            return False
        passes = zip(plan.qo_lens, plan.seq_lens, strict=True)
        num_read = sum((rows - 1) * n for rows, n in passes)
        return num_read * self._bytes() <= MOST_READ

    def _captures(self, num_rows: int) -> bool:
        """Whether a captured step takes this many rows: the next larger one, or one of
        exactly this size under SGLang's `--disable-cuda-graph-padding`."""
        graphs = self._graphs
        if num_rows > self.most_rows:
            return False
        return not getattr(graphs, "disable_padding", False) or (
            num_rows in graphs.capture_bs
        )

    def _shows_enough(self, round: Round) -> bool:
        """Whether captured steps show what a head reads, where it reads."""
        if not self.verifier.shows_features or round.head_rests:
            return True
        full = CaptureHiddenMode.FULL
        return bool(getattr(self._graphs, "capture_hidden_mode", full) >= full)

    def _bytes(self) -> int:
        """Of the KV of a token."""
        if not self._token_bytes:
            pool = self.verifier.runner.token_to_kv_pool
            self._token_bytes = bytes_per_token(pool)
        return self._token_bytes

    def run(self, round: Round, plan: VerifyPlan) -> PassOutput:
        """Writes the KV that the pass would; logits of every row."""
        table, batch = self.slots.table, round.batch
        num_rows = torch.tensor(plan.qo_lens)
        shifts = torch.tensor(mrope_shifts(batch.reqs))
        return self.verifier.decode(
            input_ids=upload(plan.input_ids, table.device),
            req_pool_indices=batch.req_pool_indices.repeat_interleave(
                upload(num_rows, table.device), output_size=plan.num_verify_tokens
            ),
            seq_lens=upload(plan.positions, table.device),
            seq_lens_cpu=plan.positions,
            table=table,
            return_hidden_states=batch.return_hidden_states,
            is_followed=not round.head_rests,
            mrope_shifts=shifts.repeat_interleave(num_rows).tolist(),
        )
