"""Segments + seq_lens -> VerifyPlan: rows, positions and visibility of one pass.

Row order of a request with context length L, draft d_1..d_n and suffixes s_1..s_K of V
tokens each: [bonus, d_1 .. d_n, s_1 .. s_K]. KV columns: the committed context [0, L),
then one column per row in the same order. Suffix k sits logically right after boundary
b_k: its positions continue at L + 1 + b_k, it sees columns [0, L + b_k] and itself,
nothing else (arXiv:2605.04263, parallel prefix verification).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_parse.sgl.upload import upload

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class RowVisibility:
    """Which KV columns of its own request a query row may attend.

    limit, start, end: int64, one entry per row; the row sees `c <= limit` and
    `start <= c <= end`.
    """

    limit: Tensor
    start: Tensor
    end: Tensor

    @classmethod
    def causal(cls, limit: Tensor) -> RowVisibility:
        """Rows that see everything up to and including column `limit`."""
        return cls(limit, torch.ones_like(limit), torch.zeros_like(limit))

    def rows(self, index: Tensor | slice) -> RowVisibility:
        """The rows at `index`, in its shape."""
        return RowVisibility(self.limit[index], self.start[index], self.end[index])

    def to(self, device: Any) -> RowVisibility:
        return RowVisibility(
            *upload(torch.stack([self.limit, self.start, self.end]), device)
        )


def expand_mask(
    visibility: RowVisibility, kv_len: int, window: int | None = None
) -> Tensor:
    """Dense mask [..., kv_len] bool of rows [...]; True may attend.

    window: how many positions before its own a row sees, None for all. It counts
    positions and not columns: the second span follows right after `limit`.
    """
    column = torch.arange(kv_len, device=visibility.limit.device)
    limit, start, end = (
        t[..., None] for t in (visibility.limit, visibility.start, visibility.end)
    )
    first, second = column <= limit, (column >= start) & (column <= end)
    if window is not None:
        # The row's own position is limit + 1 + end - start, in both kinds of rows.
        first &= column >= limit + 1 + end - start - window
        second &= column >= end - window
    return first | second


@dataclass(frozen=True)
class VerifyPlan:
    """Everything about one verify pass that does not depend on KV slots.

    input_ids, positions: [num_verify_tokens] int64. qo_lens, kv_lens: rows and KV
    columns per request (context included). verdict_rows: per request, the last row of
    each suffix. root_rows: [bs] flat row of each request's bonus token; the target's
    logits after draft token i are at root + i.
    """

    seq_lens: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]
    boundaries: tuple[tuple[int, ...], ...]
    input_ids: Tensor
    positions: Tensor
    visibility: RowVisibility
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    suffix_lens: tuple[int, ...]
    root_rows: tuple[int, ...]
    verdict_rows: tuple[tuple[int, ...], ...]

    @property
    def num_suffix_tokens(self) -> int:
        """Scratch KV slots the pass needs."""
        return sum(
            len(b) * v for b, v in zip(self.boundaries, self.suffix_lens, strict=True)
        )

    @property
    def num_verify_tokens(self) -> int:
        return sum(self.qo_lens)

    @property
    def row_columns(self) -> tuple[int, ...]:
        """Columns of each request that lie in its row of req_to_token: all but those
        of suffixes."""
        lens = zip(self.seq_lens, self.num_draft_tokens, strict=True)
        return tuple(n + 1 + num for n, num in lens)

    @property
    def num_mask_cells(self) -> int:
        """Entries of `build_custom_mask`."""
        return sum(q * k for q, k in zip(self.qo_lens, self.kv_lens, strict=True))


@dataclass(frozen=True, slots=True)
class PassRequest:
    """What one request brings to a pass.

    Raises ValueError if a boundary lies outside the draft or has no suffix.
    """

    #: Committed tokens, the bonus token not among them.
    seq_len: int
    #: The last decided token, whose KV the pass writes.
    bonus_token: int
    #: Draft token ids that the target is to see.
    draft_tokens: Sequence[int]
    #: Offsets into the draft after which a suffix is attached, rising.
    boundaries: tuple[int, ...] = ()
    #: Judge suffix token ids; may be empty where there is no boundary.
    suffix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        cuts, num_draft = self.boundaries, len(self.draft_tokens)
        if cuts and (not self.suffix or cuts[0] < 1 or cuts[-1] > num_draft):
            raise ValueError(
                f"boundaries {cuts} need a suffix and a draft of at least "
                f"{cuts[-1]} tokens; the draft has {num_draft}."
            )


def build_verify_plan(requests: Sequence[PassRequest]) -> VerifyPlan:
    """Lay out one ragged verify pass."""
    seq_lens = tuple(r.seq_len for r in requests)
    num_draft_tokens = tuple(len(r.draft_tokens) for r in requests)
    boundaries = tuple(r.boundaries for r in requests)
    suffix_lens = tuple(len(r.suffix) for r in requests)
    ids: list[int] = []
    root_rows: list[int] = []
    verdict_rows: list[tuple[int, ...]] = []
    for request in requests:
        root_rows.append(len(ids))
        ids.append(request.bonus_token)
        ids += request.draft_tokens
        first = len(ids)
        ids += request.suffix * len(request.boundaries)
        width = len(request.suffix) or 1
        verdict_rows.append(tuple(range(first + width - 1, len(ids), width)))
    ends = (*root_rows[1:], len(ids))
    qo_lens = tuple(end - root for root, end in zip(root_rows, ends, strict=True))
    positions, visibility = _lay_out_rows(
        _cut_into_sequences(seq_lens, num_draft_tokens, boundaries, suffix_lens)
    )
    return VerifyPlan(
        seq_lens=seq_lens,
        num_draft_tokens=num_draft_tokens,
        boundaries=boundaries,
        input_ids=torch.from_numpy(np.array(ids, dtype=np.int64)),
        positions=positions,
        visibility=visibility,
        qo_lens=qo_lens,
        kv_lens=tuple(n + q for n, q in zip(seq_lens, qo_lens, strict=True)),
        suffix_lens=suffix_lens,
        root_rows=tuple(root_rows),
        verdict_rows=tuple(verdict_rows),
    )


def build_custom_mask(plan: VerifyPlan, device: Any = "cpu") -> Tensor:
    """Flat bool mask, [qo_len, kv_len] per request, query-major, concatenated.

    The layout FlashInfer packs (sglang/srt/layers/attention/flashinfer_backend.py,
    `generate_attn_arg_prefill`); prefix columns included. Expanded on `device` from
    three numbers a row.
    """
    visibility = plan.visibility.to(device)
    parts = []
    row = 0
    for qo_len, kv_len in zip(plan.qo_lens, plan.kv_lens, strict=True):
        own = visibility.rows(slice(row, row + qo_len))
        parts.append(expand_mask(own, kv_len).flatten())
        row += qo_len
    return torch.cat(parts)


@dataclass(frozen=True)
class VirtualSequences:
    """The pass as causal sequences: each request's draft chain, then its suffixes.

    A sequence reads the first `prefix_lens` KV columns of its request and then its own
    tokens up to the one that attends, so no mask is needed. Tokens keep the order of
    the plan. request: whose columns it reads. own_columns: where its own tokens start
    among these.
    """

    request: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    qo_lens: tuple[int, ...]
    own_columns: tuple[int, ...]

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(p + q for p, q in zip(self.prefix_lens, self.qo_lens, strict=True))

    def causal_limits(self) -> Tensor:
        """[num_verify_tokens] int64, the last column of its sequence a row sees."""
        lens = np.array(self.qo_lens)
        return torch.from_numpy(np.repeat(self.prefix_lens, lens) + _places(lens))


def build_virtual_sequences(plan: VerifyPlan) -> VirtualSequences:
    """Cut a pass into causal sequences."""
    return _cut_into_sequences(
        plan.seq_lens, plan.num_draft_tokens, plan.boundaries, plan.suffix_lens
    )


def _cut_into_sequences(
    seq_lens: Sequence[int],
    num_draft_tokens: Sequence[int],
    boundaries: Sequence[Sequence[int]],
    suffix_lens: Sequence[int],
) -> VirtualSequences:
    request: list[int] = []
    prefix_lens: list[int] = []
    qo_lens: list[int] = []
    own_columns: list[int] = []
    pairs = zip(seq_lens, num_draft_tokens, boundaries, suffix_lens, strict=True)
    for i, (context, num_draft, cuts, width) in enumerate(pairs):
        first, num_cuts = context + 1 + num_draft, len(cuts)
        request += [i] * (1 + num_cuts)
        prefix_lens += [context, *(context + 1 + cut for cut in cuts)]
        qo_lens += [1 + num_draft, *[width] * num_cuts]
        own_columns += [context, *(first + k * width for k in range(num_cuts))]
    return VirtualSequences(
        tuple(request), tuple(prefix_lens), tuple(qo_lens), tuple(own_columns)
    )


def _lay_out_rows(sequences: VirtualSequences) -> tuple[Tensor, RowVisibility]:
    """Positions and visibility of every row of the sequences, one after another."""
    lens = np.array(sequences.qo_lens)
    place = _places(lens)
    prefix = np.repeat(sequences.prefix_lens, lens)
    own = np.repeat(sequences.own_columns, lens)
    # A request's first sequence is its chain, which sees no second span.
    request = np.array(sequences.request)
    is_first = np.ones(len(request), dtype=bool)
    is_first[1:] = request[1:] != request[:-1]
    is_chain = np.repeat(is_first, lens)
    positions = prefix + place
    spans = (
        np.where(is_chain, positions, prefix - 1),
        np.where(is_chain, 1, own),
        np.where(is_chain, 0, own + place),
    )
    return torch.from_numpy(positions), RowVisibility(*map(torch.from_numpy, spans))


def _places(lens: Array) -> Array:
    """[sum(lens)]: 0, 1, .. within each sequence."""
    return np.arange(lens.sum()) - np.repeat(lens.cumsum() - lens, lens)
