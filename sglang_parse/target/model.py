"""The target model as the engine uses it: a round in, hidden states and tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from sglang_parse.requests.round import Round
from sglang_parse.runtime.batches import mrope_shifts
from sglang_parse.runtime.grammar import mask_for_rows
from sglang_parse.runtime.protocols import SchedulerBatch
from sglang_parse.runtime.readback import StepTokens
from sglang_parse.runtime.sampling import (
    expand_rows,
    join_outputs,
    sample_rows,
    token_needs,
)
from sglang_parse.runtime.slots import RoundSlots
from sglang_parse.runtime.upload import upload
from sglang_parse.target.layout import VerifyPlan
from sglang_parse.target.output import PassOutput
from sglang_parse.target.passes import TargetVerifier


class TargetModel:
    """Passes of `verifier` over the slots of SGLang's pools."""

    def __init__(self, verifier: TargetVerifier, slots: RoundSlots) -> None:
        self.verifier = verifier
        self.slots = slots

    def verify(self, round: Round, plan: VerifyPlan) -> PassOutput:
        """The pass, its judge suffixes in scratch slots."""
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

    def decode(
        self, round: Round, go_on: Callable[[list[list[int]], int], bool]
    ) -> list[list[int]]:
        """The target's ordinary decode steps behind each bonus token. Between them the
        host never waits for the step that runs.

        go_on: asked before each step but the first, with the tokens of the steps that
        are known and the number of all.
        """
        batch = round.batch
        device = batch.seq_lens.device
        host_lens = torch.tensor([r.seq_len for r in round])
        lens = upload(host_lens, device)
        tokens = upload([r.bonus_token for r in round], device)
        shifts = mrope_shifts(batch.reqs)
        owner = range(len(round))
        info = self._info(round, owner)
        steps, samples = StepTokens(device), []
        for k in range(round.num_steps):
            if k and not go_on(steps.known(), k):
                break
            round.output = self.verifier.decode(
                input_ids=tokens,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=lens,
                seq_lens_cpu=host_lens,
                table=self.slots.table,
                return_hidden_states=batch.return_hidden_states,
                is_followed=not round.head_rests,
                mrope_shifts=shifts,
            )
            tokens, sampled = self._sample(
                round, round.output.logits, info, owner, [k] * len(round), lens
            )
            steps.add(tokens)
            samples.append(sampled)
            lens, host_lens = lens + 1, host_lens + 1
        round.sampled = self.join_samples(samples)
        return steps.all()

    def keep(self, round: Round) -> None:
        """Behind a pass: bring recurrent states to the decided tokens but the last,
        whose row no pass has had yet. A decode step has brought them there itself."""
        advance = round.output.advance
        if advance is not None:
            advance([len(r.decision.accept_tokens) for r in round])

    def prefill(
        self, batch: SchedulerBatch, *, needed: bool
    ) -> tuple[Any, Tensor | None]:
        return self.verifier.prefill(batch, needed=needed)

    def sample(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[list[int], LogitsProcessorOutput]:
        """The target's own tokens behind `offset` draft tokens of requests `owner`."""
        requests = round.requests
        pairs = list(zip(owner, offset, strict=True))
        rows = [requests[i].row_at(j) for i, j in pairs]
        positions = [requests[i].seq_len + j for i, j in pairs]
        device = round.batch.seq_lens.device
        logits = self.verifier.logits_of(round.output, rows)
        tokens, sampled = self._sample(
            round,
            logits,
            self._info(round, owner),
            owner,
            offset,
            upload(positions, device),
        )
        chosen: list[int] = tokens.tolist()
        return chosen, sampled

    def _info(self, round: Round, owner: Sequence[int]) -> Any:
        """Sampling state with a row for each of these requests."""
        batch = round.batch
        return expand_rows(batch.sampling_info, list(owner), batch.seq_lens.device)

    def _sample(
        self,
        round: Round,
        logits: Tensor,
        info: Any,
        owner: Sequence[int],
        offset: Sequence[int],
        positions: Tensor,
    ) -> tuple[Tensor, LogitsProcessorOutput]:
        """[rows] tokens drawn from `logits` of requests `owner`, and their logprobs.

        info: `_info` of these requests. Steps in a row share one.
        """
        batch, grammars = round.batch, [r.grammar for r in round]
        return sample_rows(
            self.verifier.runner,
            logits,
            sampling_info=info,
            positions=positions,
            grammar_mask=mask_for_rows(grammars, owner, offset),
            needs=token_needs(batch, owner),
        )

    def join_samples(
        self, samples: Sequence[LogitsProcessorOutput]
    ) -> LogitsProcessorOutput:
        return join_outputs(samples)
