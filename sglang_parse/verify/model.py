"""The target model as the engine uses it: a round in, hidden states and tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.fast_paths import (
    SAMPLED_ROWS,
    SHORT_PASSES,
    PassFailed,
    PassLacksMemory,
    is_out_of_memory,
)
from sglang_parse.sgl.forward_batches import mrope_shifts
from sglang_parse.sgl.sampling import join_outputs
from sglang_parse.sgl.scheduler_types import SchedulerBatch
from sglang_parse.sgl.slots import RoundSlots
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.drawing import draw, sampling_state
from sglang_parse.verify.layout import VerifyPlan
from sglang_parse.verify.output import PassOutput
from sglang_parse.verify.passes import TargetVerifier
from sglang_parse.verify.short_passes import ShortPasses
from sglang_parse.verify.steps import GoOn, decode_steps


class TargetModel:
    """Passes of `verifier` over the slots of SGLang's pools."""

    def __init__(self, verifier: TargetVerifier, slots: RoundSlots) -> None:
        self.verifier = verifier
        self.slots = slots
        self.short_passes = ShortPasses(verifier, slots)

    def verify(self, round: Round, plan: VerifyPlan) -> PassOutput:
        """The pass, its judge suffixes in scratch slots. Raises PassFailed where no way
        is left, PassLacksMemory where that may pass."""
        if self.verifier.steps_alone:
            return self._verify_in_steps(round, plan)
        if self.short_passes.fits(round, plan):
            return self.verifier.paths.run(
                SHORT_PASSES,
                partial(self.short_passes.run, round, plan),
                partial(self._verify, round, plan),
            )
        return self._verify(round, plan)

    def _verify_in_steps(self, round: Round, plan: VerifyPlan) -> PassOutput:
        """The pass as decode rows, by a captured step or without one."""
        if not self.verifier.can_pass:
            raise PassFailed(f"{SHORT_PASSES} is off, and there is no verify route")
        try:
            return self.short_passes.run(round, plan)
        except Exception as error:
            instead = "the target continues by plain steps"
            self.verifier.paths.break_off(SHORT_PASSES, error, instead)
            lacks_memory = is_out_of_memory(error)
        raise (PassLacksMemory if lacks_memory else PassFailed)("a short pass raised")

    def _verify(self, round: Round, plan: VerifyPlan) -> PassOutput:
        tree_cache = round.batch.tree_cache
        scratch = self.slots.take_scratch(tree_cache, plan.num_suffix_tokens)
        try:
            return self.verifier.verify(
                plan,
                rows=[r.row for r in round],
                req_pool_indices=round.batch.req_pool_indices,
                scratch=scratch,
                table=self.slots.table,
                mrope_shifts=mrope_shifts(round.batch.reqs),
            )
        finally:
            self.slots.release_scratch(scratch)

    def decode(self, round: Round, go_on: GoOn) -> list[list[int]]:
        """The tokens of the target's ordinary decode steps (`decode_steps`)."""
        tokens, samples = decode_steps(self.verifier, round, self.slots.table, go_on)
        round.sampled = self.join_samples(samples)
        return tokens

    def prefill(
        self, batch: SchedulerBatch, *, needed: bool
    ) -> tuple[Any, Tensor | None]:
        return self.verifier.prefill(batch, needed=needed)

    def sample(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[list[int], LogitsProcessorOutput]:
        """The target's own tokens after `offset` draft tokens of requests `owner`."""
        tokens, sampled = self.verifier.paths.run(
            SAMPLED_ROWS,
            partial(self._sample, round, owner, offset),
            partial(self._sample_apart, round, owner, offset),
        )
        chosen: list[int] = tokens.tolist()
        return chosen, sampled

    def _sample(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[Tensor, LogitsProcessorOutput]:
        requests = round.requests
        pairs = list(zip(owner, offset, strict=True))
        rows = [requests[i].root_row + j for i, j in pairs]
        positions = [requests[i].seq_len + j for i, j in pairs]
        return draw(
            self.verifier.runner,
            round,
            self.verifier.logits_of(round.output, rows),
            info=sampling_state(round, owner),
            owner=owner,
            offset=offset,
            positions=upload(positions, round.batch.seq_lens.device),
        )

    def _sample_apart(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[Tensor, LogitsProcessorOutput]:
        """The same row by row."""
        drawn = [
            self._sample(round, [i], [j]) for i, j in zip(owner, offset, strict=True)
        ]
        tokens = torch.cat([tokens for tokens, _ in drawn])
        return tokens, self.join_samples([sampled for _, sampled in drawn])

    def join_samples(
        self, samples: Sequence[LogitsProcessorOutput]
    ) -> LogitsProcessorOutput:
        return join_outputs(samples)
