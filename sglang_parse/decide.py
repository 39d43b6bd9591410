"""VerifyOutput -> Decision: the maximal valid prefix, then the exact tail.

Pure functions of host values and logits; no device sync beyond reading the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def verdict_scores(logits: Tensor, verdict_ids: Sequence[tuple[int, int]]) -> Tensor:
    """P(yes) / (P(yes) + P(no)) at verdict rows, summed over the token pairs.

    logits: [rows, vocab] float. verdict_ids: (yes, no) token ids. Returns [rows]
    float32. Source: arXiv:2605.04263, verdict read from Yes against No.
    """
    pairs = torch.tensor(verdict_ids, device=logits.device)
    mass = logits[:, pairs].float().logsumexp(dim=1)
    return torch.sigmoid(mass[:, 0] - mass[:, 1])


def count_valid_segments(
    scores: Sequence[float], *, threshold: float, keep_rule: str
) -> int:
    """Segments in the maximal valid prefix.

    `first-failure`: up to the first score below the threshold. `longest`: up to the
    last score that reaches it, whatever failed before.
    """
    passes = [s >= threshold for s in scores]
    if keep_rule == "longest":
        return max((k + 1 for k, ok in enumerate(passes) if ok), default=0)
    return passes.index(False) if False in passes else len(passes)


@dataclass(frozen=True)
class Cut:
    """Where one request's draft is cut by the verdicts.

    num_kept: draft tokens in the maximal valid prefix. tail_end: draft tokens up to
    which the exact tail may go on; the target's logits are needed at rows
    num_kept..tail_end. reuse_tail: the draft past the cut was not judged (it reached
    no boundary) and may be kept for the next round. rejected_end: end of the first
    rejected segment, 0 if no verdict failed.
    """

    num_kept: int
    tail_end: int
    reuse_tail: bool
    rejected_end: int = 0


def choose_cut(
    scores: Sequence[float],
    boundaries: Sequence[int],
    *,
    num_draft_tokens: int,
    threshold: float,
    keep_rule: str,
    exact_tail: bool,
) -> Cut:
    """Cut of one semantic request. scores: one per boundary.

    The exact tail runs through the first rejected segment; where every verdict
    passed, the unjudged rest of the draft waits for its own boundary instead.
    """
    num_valid = count_valid_segments(scores, threshold=threshold, keep_rule=keep_rule)
    num_kept = boundaries[num_valid - 1] if num_valid else 0
    if num_valid < len(boundaries):
        rejected_end = boundaries[num_valid]
        tail_end = rejected_end if exact_tail else num_kept
        return Cut(num_kept, tail_end, reuse_tail=False, rejected_end=rejected_end)
    unjudged = num_kept < num_draft_tokens
    if num_valid == 0 and exact_tail:
        return Cut(num_kept, num_draft_tokens, reuse_tail=False)
    return Cut(num_kept, num_kept, reuse_tail=unjudged)


def exact_cut(num_draft_tokens: int) -> Cut:
    """Cut of a request without verdicts: token-level verification of the draft."""
    return Cut(0, num_draft_tokens, reuse_tail=False)


@dataclass(frozen=True)
class Decision:
    """What one request emits this round.

    accept_tokens: kept draft tokens, then the target's own token (never empty).
    num_judged: draft tokens kept by verdict; num_matched: kept by the exact tail.
    pending: draft tokens after accept_tokens that stay for the next round.
    """

    accept_tokens: tuple[int, ...]
    num_judged: int
    num_matched: int
    pending: tuple[int, ...]

    @property
    def num_correct_drafts(self) -> int:
        return self.num_judged + self.num_matched


def decide(
    cut: Cut, draft_tokens: Sequence[int], target_tokens: Sequence[int]
) -> Decision:
    """Follow the target from the cut while it agrees with the draft.

    target_tokens: the target's own choice at rows num_kept..tail_end. Each was drawn
    from the target's distribution given the tokens before it, so the tail is
    distributed exactly as the target's own continuation.
    """
    at = cut.num_kept
    for target_token in target_tokens:
        if at >= cut.tail_end or draft_tokens[at] != target_token:
            break
        at += 1
    bonus = target_tokens[at - cut.num_kept]
    pending: tuple[int, ...] = ()
    if cut.reuse_tail and draft_tokens[at] == bonus:
        pending = tuple(draft_tokens[at + 1 :])
    return Decision(
        accept_tokens=(*draft_tokens[:at], bonus),
        num_judged=cut.num_kept,
        num_matched=at - cut.num_kept,
        pending=pending,
    )
