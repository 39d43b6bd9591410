"""What each sampled token was drawn from (`return_sampling_mask`), over a round.

SGLang's sampler returns the supports of the rows that want them. A round samples
several rows of a request, in several calls, and the scheduler expects one support for
each token that it emits (speculative/spec_sampling_mask.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import SamplingMaskOutput
from torch import Tensor

from sglang_parse.sgl.upload import upload

FIELDS = ("token_ids", "lengths", "selected_logprobs", "support_logprobs", "statuses")


def empty_rows(num: int, device: Any) -> SamplingMaskOutput:
    """`num` rows that say nothing; their status is SamplingMaskStatus.OK."""
    ids = torch.zeros((num, 1), dtype=torch.int32, device=device)
    return SamplingMaskOutput(
        token_ids=ids,
        lengths=ids[:, 0],
        selected_logprobs=ids[:, 0].float(),
        support_logprobs=ids.float(),
        statuses=ids[:, 0],
    )


def spread(
    found: SamplingMaskOutput | None, info: Any, device: Any
) -> SamplingMaskOutput:
    """The supports of one call of the sampler, a row for every sampled row.

    found: rows of requests that want supports, None where none does. info: what the
    rows were sampled with. Returns [rows, width] token ids and their logprobs, and
    [rows] of all else; rows of other requests are empty.
    """
    wanted = info.return_sampling_masks
    if found is None:
        return empty_rows(len(wanted), device)
    rows = upload([i for i, wants in enumerate(wanted) if wants], device, torch.int64)
    support = found.token_ids.new_zeros(found.token_ids.shape, dtype=torch.float32)
    if found.support_logprobs is not None:
        support[info.sampling_support_logprobs_capture_indices] = found.support_logprobs

    def placed(values: Tensor) -> Tensor:
        whole = values.new_zeros((len(wanted), *values.shape[1:]))
        return whole.index_copy(0, rows, values)

    return SamplingMaskOutput(
        token_ids=placed(found.token_ids),
        lengths=placed(found.lengths),
        selected_logprobs=placed(found.selected_logprobs),
        support_logprobs=placed(support),
        statuses=placed(found.statuses),
    )


def join(parts: Sequence[SamplingMaskOutput]) -> SamplingMaskOutput:
    """The supports of several calls (`spread`), their rows one after the other."""
    width = max(part.token_ids.shape[1] for part in parts)

    def cat(name: str) -> Tensor:
        values = [getattr(part, name) for part in parts]
        if values[0].dim() == 1:
            return torch.cat(values)
        pad = torch.nn.functional.pad
        return torch.cat([pad(v, (0, width - v.shape[1])) for v in values])

    return SamplingMaskOutput(**{name: cat(name) for name in FIELDS})


def lay_out(
    masks: SamplingMaskOutput,
    places: Sequence[Sequence[int]],
    wants_support: Sequence[bool],
) -> SamplingMaskOutput:
    """The supports of a step as the scheduler reads those of speculative decoding.

    masks: of all sampled rows of the round. places: per request that wants them, the
    sampled row of each token that it gets. wants_support: of the same requests, whether
    each wants the logprobs of its whole support.

    Returns [requests, tokens, width] token ids; [requests, tokens] lengths, logprobs of
    the tokens and statuses; and [requests that want it, tokens, width] logprobs. One
    that gets no token has one empty row, as SGLang takes the worst status of its rows.
    """
    num_tokens = max(1, *map(len, places))
    device = masks.token_ids.device
    blank = len(masks.lengths)
    table = [[*own, *[blank] * (num_tokens - len(own))] for own in places]
    index = upload(table, device, torch.int64)
    wanted = [i for i, wants in enumerate(wants_support) if wants]

    def chosen(values: Tensor, at: Tensor = index) -> Tensor:
        padded = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])
        return padded[at]

    return SamplingMaskOutput(
        token_ids=chosen(masks.token_ids),
        lengths=chosen(masks.lengths),
        selected_logprobs=chosen(masks.selected_logprobs),
        support_logprobs=chosen(
            masks.support_logprobs, index[upload(wanted, device, torch.int64)]
        )
        if wanted
        else None,
        statuses=chosen(masks.statuses),
        num_accept_tokens=torch.tensor([max(1, len(own)) for own in places]),
    )
