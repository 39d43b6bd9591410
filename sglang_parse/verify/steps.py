"""The target's ordinary decode steps, several in a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.forward_batches import mrope_shifts
from sglang_parse.sgl.readback import StepTokens
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.drawing import draw, sampling_state
from sglang_parse.verify.passes import TargetVerifier

# Called before each step but the first, with the tokens of the steps that are known and
# the number of all: whether there is another one.
GoOn = Callable[[list[list[int]], int], bool]


def decode_steps(
    verifier: TargetVerifier, round: Round, table: Tensor, go_on: GoOn
) -> tuple[list[list[int]], list[LogitsProcessorOutput]]:
    """Tokens and logprobs of up to `num_steps` steps after each bonus token; the
    round's `output` is the last one's.

    Each step begins with what the one before it samples, and the host does not wait for
    that in between. table: req_to_token.
    """
    batch = round.batch
    device = batch.seq_lens.device
    info = sampling_state(round, range(len(round)))
    shifts = mrope_shifts(batch.reqs)
    host_lens = torch.tensor([r.seq_len for r in round])
    lens = upload(host_lens, device)
    tokens = upload([r.bonus_token for r in round], device)
    steps, samples = StepTokens(device), list[LogitsProcessorOutput]()
    while len(samples) < round.num_steps and (
        not samples or go_on(steps.known(), len(samples))
    ):
        round.output = verifier.decode(
            input_ids=tokens,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lens,
            seq_lens_cpu=host_lens,
            table=table,
            return_hidden_states=batch.return_hidden_states,
            is_followed=not round.head_rests,
            mrope_shifts=shifts,
        )
        tokens, sampled = draw(
            verifier.runner,
            round,
            round.output.logits,
            info=info,
            owner=range(len(round)),
            offset=[len(samples)] * len(round),
            positions=lens,
        )
        steps.add(tokens)
        samples.append(sampled)
        lens, host_lens = lens + 1, host_lens + 1
    return steps.all(), samples
