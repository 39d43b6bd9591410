"""Segments + seq_lens -> VerifyPlan: rows, positions and visibility of one pass.

Row order of a request with context length L, draft d_1..d_n and suffixes s_1..s_K of
V tokens each: [bonus, d_1 .. d_n, s_1 .. s_K]. KV columns: the committed context
[0, L), then one column per row in the same order. Suffix k sits logically right after
boundary b_k: its positions continue at L + 1 + b_k, it sees columns [0, L + b_k] and
itself, nothing else (arXiv:2605.04263, parallel prefix verification).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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

    def rows(self, index: Tensor) -> RowVisibility:
        """The rows at `index`, in its shape."""
        return RowVisibility(self.limit[index], self.start[index], self.end[index])

    def to(self, device: Any) -> RowVisibility:
        return RowVisibility(
            *torch.stack([self.limit, self.start, self.end]).to(device)
        )


def expand_mask(visibility: RowVisibility, kv_len: int) -> Tensor:
    """Dense mask [..., kv_len] bool of rows [...]; True may attend."""
    column = torch.arange(kv_len, device=visibility.limit.device)
    return (column <= visibility.limit[..., None]) | (
        (column >= visibility.start[..., None]) & (column <= visibility.end[..., None])
    )


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
    def num_mask_cells(self) -> int:
        """Entries of `build_custom_mask`."""
        return sum(q * k for q, k in zip(self.qo_lens, self.kv_lens, strict=True))


def build_verify_plan(
    *,
    seq_lens: Sequence[int],
    bonus_tokens: Sequence[int],
    draft_tokens: Sequence[Sequence[int]],
    boundaries: Sequence[Sequence[int]],
    suffix_tokens: Sequence[Sequence[int]],
) -> VerifyPlan:
    """Lay out one ragged verify pass.

    seq_lens: committed tokens per request, the bonus token not among them.
    boundaries: per request, offsets into its draft after which a suffix is attached.
    suffix_tokens: judge suffix per request; may be empty where there is no boundary.
    Raises ValueError if a boundary lies outside the draft or has no suffix.
    """
    ids: list[int] = []
    positions: list[int] = []
    limit: list[int] = []
    start: list[int] = []
    end: list[int] = []
    root_rows: list[int] = []
    verdict_rows: list[tuple[int, ...]] = []
    qo_lens: list[int] = []
    requests = zip(
        seq_lens, bonus_tokens, draft_tokens, boundaries, suffix_tokens, strict=True
    )
    for context, bonus, draft, cuts, suffix in requests:
        if cuts and (not suffix or cuts[0] < 1 or cuts[-1] > len(draft)):
            raise ValueError(
                f"boundaries {tuple(cuts)} need a suffix and a draft of at least "
                f"{cuts[-1]} tokens; the draft has {len(draft)}."
            )
        root = len(ids)
        chain = len(draft) + 1
        ids += [bonus, *draft]
        positions += range(context, context + chain)
        limit += range(context, context + chain)
        start += [1] * chain
        end += [0] * chain
        column = context + chain
        verdicts = []
        for cut in cuts:
            width = len(suffix)
            ids += suffix
            positions += range(context + 1 + cut, context + 1 + cut + width)
            limit += [context + cut] * width
            start += [column] * width
            end += range(column, column + width)
            column += width
            verdicts.append(len(ids) - 1)
        root_rows.append(root)
        verdict_rows.append(tuple(verdicts))
        qo_lens.append(len(ids) - root)
    return VerifyPlan(
        seq_lens=tuple(seq_lens),
        num_draft_tokens=tuple(len(d) for d in draft_tokens),
        boundaries=tuple(tuple(b) for b in boundaries),
        input_ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        visibility=RowVisibility(
            torch.tensor(limit), torch.tensor(start), torch.tensor(end)
        ),
        qo_lens=tuple(qo_lens),
        kv_lens=tuple(c + q for c, q in zip(seq_lens, qo_lens, strict=True)),
        suffix_lens=tuple(len(s) for s in suffix_tokens),
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
        index = torch.arange(row, row + qo_len, device=device)
        parts.append(expand_mask(visibility.rows(index), kv_len).flatten())
        row += qo_len
    return torch.cat(parts)


@dataclass(frozen=True)
class VirtualSequences:
    """The pass as causal sequences: each request's draft chain, then its suffixes.

    A sequence reads the first `prefix_lens` KV columns of its request and then its own
    tokens, up to the one that asks; so no mask is needed. Tokens keep the order of the
    plan. request: whose columns it reads. own_columns: where its own tokens start among
    these.
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
        lens = zip(self.prefix_lens, self.kv_lens, strict=True)
        return torch.cat([torch.arange(p, k) for p, k in lens])


def build_virtual_sequences(plan: VerifyPlan) -> VirtualSequences:
    """Cut a pass into causal sequences."""
    sequences: list[tuple[int, int, int, int]] = []
    for i, context in enumerate(plan.seq_lens):
        chain = 1 + plan.num_draft_tokens[i]
        sequences.append((i, context, chain, context))
        width = plan.suffix_lens[i]
        for k, cut in enumerate(plan.boundaries[i]):
            own = context + chain + k * width
            sequences.append((i, context + 1 + cut, width, own))
    return VirtualSequences(*(tuple(column) for column in zip(*sequences, strict=True)))
