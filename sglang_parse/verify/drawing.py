"""The target's own tokens, drawn for rows of a round as SGLang draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.grammar import mask_for_rows
from sglang_parse.sgl.sampling import expand_rows, sample_rows, token_needs


def sampling_state(round: Round, owner: Sequence[int]) -> Any:
    """SGLang's sampling state with a row for each of the requests `owner`."""
    batch = round.batch
    return expand_rows(batch.sampling_info, list(owner), batch.seq_lens.device)


def draw(
    runner: Any,
    round: Round,
    logits: Tensor,
    *,
    info: Any,
    owner: Sequence[int],
    offset: Sequence[int],
    positions: Tensor,
) -> tuple[Tensor, LogitsProcessorOutput]:
    """[rows] tokens drawn from `logits` of requests `owner`, and their logprobs.

    info: `sampling_state` of these requests; steps in a row share one. offset: tokens
    of the round in front of each row.
    """
    grammars = [r.grammar for r in round]
    return sample_rows(
        runner,
        logits,
        sampling_info=info,
        positions=positions,
        grammar_mask=mask_for_rows(grammars, owner, offset),
        needs=token_needs(round.batch, owner),
    )
