"""Slow oracles: what the package computes, written again from the definitions.

Nested loops over plain lists, no code shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def row_labels(
    num_draft: int,
    boundaries: Sequence[int],
    suffix_len: int,
) -> list[tuple[str, int, int]]:
    """What each row of a verify pass is: ("draft", i, 0) or ("suffix", k, j).

    ("draft", 0, 0) is the bonus token, whose KV is not committed yet.
    """
    rows = [("draft", i, 0) for i in range(num_draft + 1)]
    for k in range(len(boundaries)):
        rows += [("suffix", k, j) for j in range(suffix_len)]
    return rows


def verify_mask(
    seq_len: int,
    num_draft: int,
    boundaries: Sequence[int],
    suffix_len: int,
) -> list[list[bool]]:
    """[qo_len][kv_len] of one request, cell by cell.

    Suffix k sees the context, the draft up to boundary k and itself causally; draft
    token i sees the context and the drafts up to itself.
    """
    rows = row_labels(num_draft, boundaries, suffix_len)
    columns = [("context", c, 0) for c in range(seq_len)] + rows
    mask = []
    for kind, i, j in rows:
        line = []
        for seen, a, b in columns:
            if seen == "context":
                sees = True
            elif kind == "draft":
                sees = seen == "draft" and a <= i
            elif seen == "draft":
                sees = a <= boundaries[i]
            else:
                sees = seen == "suffix" and a == i and b <= j
            line.append(sees)
        mask.append(line)
    return mask


def window_mask(
    mask: Sequence[Sequence[bool]],
    rows: Sequence[int],
    columns: Sequence[int],
    window: int,
) -> list[list[bool]]:
    """`mask` less the columns whose position lies more than `window` before the row's.

    rows, columns: positions of both.
    """
    return [
        [sees and columns[c] >= rows[r] - window for c, sees in enumerate(line)]
        for r, line in enumerate(mask)
    ]


def verify_positions(
    seq_len: int,
    num_draft: int,
    boundaries: Sequence[int],
    suffix_len: int,
) -> list[int]:
    """Rotary position of each row: how many tokens precede it in its own reading."""
    positions = []
    for kind, i, j in row_labels(num_draft, boundaries, suffix_len):
        if kind == "draft":
            positions.append(seq_len + i)
        else:
            positions.append(seq_len + 1 + boundaries[i] + j)
    return positions


def softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / sum(powers) for p in powers]


def verdict_score(logits: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """P(yes) / (P(yes) + P(no)), probabilities summed over the pairs."""
    p = softmax(logits)
    yes = sum(p[y] for y, _ in pairs)
    no = sum(p[n] for _, n in pairs)
    return yes / (yes + no)


def num_judged_tokens(
    scores: Sequence[float],
    boundaries: Sequence[int],
    threshold: float,
    keep_rule: str,
) -> int:
    """Draft tokens in the maximal valid prefix, by trying every prefix."""
    best = 0
    for k, boundary in enumerate(boundaries):
        if keep_rule == "longest":
            valid = scores[k] >= threshold
        else:
            valid = True
            for score in scores[: k + 1]:
                if score < threshold:
                    valid = False
        if valid and boundary > best:
            best = boundary
    return best


def round_output(
    *,
    draft: Sequence[int],
    target: Sequence[int],
    scores: Sequence[float],
    boundaries: Sequence[int],
    threshold: float,
    keep_rule: str,
    exact_tail: bool,
) -> tuple[list[int], int, int, list[int]]:
    """(accept_tokens, num_judged, num_matched, pending) of one semantic round.

    target[i]: the target's own token after i draft tokens. The exact tail runs from the
    cut through the first rejected segment (through the whole draft if nothing was
    judged or nothing of it has a boundary). Where no verdict failed, what follows the
    last boundary waits for a boundary of its own, if the target agrees with its first
    token.
    """
    judged = num_judged_tokens(scores, boundaries, threshold, keep_rule)
    rejected = [b for b in boundaries if b > judged]
    if not exact_tail:
        tail_end = judged
    elif rejected:
        tail_end = rejected[0]
    elif judged == 0:
        tail_end = len(draft)
    else:
        tail_end = judged
    at = judged
    while at < tail_end and draft[at] == target[at]:
        at += 1
    waits = not rejected and tail_end == judged and at < len(draft)
    pending: list[int] = []
    if waits and draft[at] == target[at]:
        pending = list(draft[at + 1 :])
    return [*draft[:at], target[at]], judged, at - judged, pending


def exact_output(draft: Sequence[int], target: Sequence[int]) -> list[int]:
    """Token-level verification: drafts while they match, then the target's token."""
    accepted = []
    for drafted, own in zip(draft, target, strict=False):
        if drafted != own:
            break
        accepted.append(drafted)
    return [*accepted, target[len(accepted)]]


def attention(
    q: Sequence[Sequence[Sequence[float]]],
    k: Sequence[Sequence[Sequence[float]]],
    v: Sequence[Sequence[Sequence[float]]],
    mask: Sequence[Sequence[bool]],
    scaling: float,
    sinks: Sequence[float] | None = None,
    logit_cap: float = 0.0,
) -> list[list[list[float]]]:
    """Softmax attention of one request, one row, head and column at a time.

    q: [rows][heads][dim]; k, v: [columns][kv_heads][dim]. Query heads share KV heads in
    consecutive groups. sinks: [heads] scores that take weight and give no value.
    """
    heads, kv_heads = len(q[0]), len(k[0])
    out = []
    for row, visible in zip(q, mask, strict=True):
        columns = [c for c, sees in enumerate(visible) if sees]
        heads_out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = [
                scaling * sum(a * b for a, b in zip(row[h], k[c][g], strict=True))
                for c in columns
            ]
            if logit_cap:
                scores = [logit_cap * math.tanh(s / logit_cap) for s in scores]
            if sinks is not None:
                scores.append(sinks[h])
            weights = softmax(scores)[: len(columns)]
            heads_out.append(
                [
                    sum(w * v[c][g][d] for w, c in zip(weights, columns, strict=True))
                    for d in range(len(v[0][0]))
                ]
            )
        out.append(heads_out)
    return out


def newline_tokens(pieces: Sequence[str]) -> list[int]:
    """Tokens whose last line break comes behind something visible."""
    found, before = [], ""
    for i, piece in enumerate(pieces):
        if "\n" in piece and (before + piece[: piece.rindex("\n")]).strip():
            found.append(i)
        before += piece
    return found


def last_line_breaks(pieces: Sequence[str], previous_text: str) -> list[int]:
    """Offset in previous_text and the draft of the last line break of each of
    newline_tokens."""
    starts = [len(previous_text + "".join(pieces[:i])) for i in range(len(pieces))]
    return [starts[i] + pieces[i].rindex("\n") for i in newline_tokens(pieces)]


def merge_blank(found: Sequence[int], pieces: Sequence[str]) -> list[int]:
    """Rising boundaries; a blank segment joins the one before it, at the start of the
    draft the one after it."""
    cuts: list[int] = []
    for b in sorted(set(found)):
        start = cuts[-1] if cuts else 0
        if "".join(pieces[start:b]).strip():
            cuts.append(b)
        elif cuts:
            cuts[-1] = b
    return cuts
