"""VerifyOutput -> Decision: the maximal valid prefix, then the exact tail.

Pure functions of host values and logits; none waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

NO_PAIR = (-1, -1)  # where a row has fewer verdict tokens than another


def verdict_scores(
    logits: Tensor, verdict_ids: Sequence[tuple[tuple[int, int], ...]]
) -> Tensor:
    """P(yes) / (P(yes) + P(no)) at verdict rows, summed over the token pairs.

    logits: [rows, vocab] float. verdict_ids: per row, its (yes, no) token ids; rows may
    have different numbers of pairs. Returns [rows] float32. Source: arXiv:2605.04263,
    verdict read from Yes against No.
    """
    if not verdict_ids:
        return logits.new_empty(0, dtype=torch.float32)
    most = max(map(len, verdict_ids))
    padded = [[*pairs, *[NO_PAIR] * (most - len(pairs))] for pairs in verdict_ids]
    # The host does not wait for the copy.
    ids = torch.tensor(padded).to(logits.device, non_blocking=True)
    chosen = logits.gather(1, ids.clamp(min=0).flatten(1)).view(ids.shape)
    # [rows, yes or no]
    mass = chosen.float().masked_fill(ids < 0, -math.inf).logsumexp(dim=1)
    return torch.sigmoid(mass[:, 0] - mass[:, 1])


def count_valid_segments(
    scores: Sequence[float], *, threshold: float | Sequence[float], keep_rule: str
) -> int:
    """Segments in the maximal valid prefix. threshold: of all scores, or of each.

    `first-failure`: up to the first score below the threshold. `longest`: up to the
    last score that reaches it, whatever failed before.
    """
    if isinstance(threshold, (int, float)):
        threshold = [threshold] * len(scores)
    passes = [s >= t for s, t in zip(scores, threshold, strict=True)]
    if keep_rule == "longest":
        return max((k + 1 for k, ok in enumerate(passes) if ok), default=0)
    return passes.index(False) if False in passes else len(passes)


@dataclass(frozen=True)
class Cut:
    """Where one request's draft is cut by the verdicts."""

    #: Draft tokens in the maximal valid prefix.
    num_kept: int
    #: Draft tokens up to which the exact tail may go on. The target's logits are needed
    #: at rows num_kept..tail_end.
    tail_end: int
    #: Whether the draft past the cut, which reached no boundary, may wait for the next
    #: round.
    reuse_tail: bool
    #: End of the first rejected segment, 0 if no verdict failed.
    rejected_end: int = 0
    #: Leading draft tokens that stand only if the target writes the same ones, at most
    #: num_kept.
    exact_end: int = 0

    @property
    def rows(self) -> list[int]:
        """Draft offsets behind which the target's own token is needed."""
        return [*range(self.exact_end), *range(self.num_kept, self.tail_end + 1)]

    def failed_at_verdict(self, decision: Decision) -> bool:
        """Whether it was a verdict that ended what was kept, not the exact part."""
        return bool(self.rejected_end) and decision.num_judged == self.num_kept


def choose_cut(
    scores: Sequence[float],
    boundaries: Sequence[int],
    *,
    num_draft_tokens: int,
    threshold: float | Sequence[float],
    keep_rule: str,
    exact_tail: bool,
    exact_end: int = 0,
) -> Cut:
    """Cut of one semantic request. scores: one per boundary, all behind exact_end.

    The exact tail runs through the first rejected segment; where every verdict
    passed, the unjudged end of the draft waits for its own boundary instead.
    """
    num_valid = count_valid_segments(scores, threshold=threshold, keep_rule=keep_rule)
    num_kept = boundaries[num_valid - 1] if num_valid else exact_end
    reuse_tail, rejected_end, tail_end = False, 0, num_kept
    if num_valid < len(boundaries):
        rejected_end = boundaries[num_valid]
        tail_end = rejected_end if exact_tail else num_kept
    elif num_valid == 0 and exact_tail:
        tail_end = num_draft_tokens
    else:
        reuse_tail = num_kept < num_draft_tokens
    return Cut(num_kept, tail_end, reuse_tail, rejected_end, exact_end)


def exact_cut(num_draft_tokens: int) -> Cut:
    """Cut of a request without verdicts: token-level verification of the draft."""
    return Cut(0, num_draft_tokens, reuse_tail=False)


@dataclass(frozen=True)
class Decision:
    """What one request emits this round."""

    #: Kept draft tokens, then the target's own token. Empty only where a text is judged
    #: and nothing is generated, or where the request failed.
    accept_tokens: tuple[int, ...]
    #: Draft tokens up to the last kept verdict, or of the exact part where none passed.
    num_judged: int
    #: Tokens behind them that equal the target's own.
    num_matched: int
    #: Draft tokens after accept_tokens that stay for the next round.
    pending: tuple[int, ...]

    @property
    def num_correct_drafts(self) -> int:
        return self.num_judged + self.num_matched


def decide(
    cut: Cut, draft_tokens: Sequence[int], target_tokens: Sequence[int]
) -> Decision:
    """Follow the target from the cut while it agrees with the draft.

    target_tokens: the target's own choice at `cut.rows`. Each was drawn from the
    target's distribution given the tokens before it, so what is followed token by
    token is distributed exactly as the target's own continuation.
    """
    leading = target_tokens[: cut.exact_end]
    at = count_agreeing(draft_tokens, leading)
    if at < cut.exact_end:
        return Decision((*draft_tokens[:at], leading[at]), 0, at, ())
    tail = target_tokens[cut.exact_end :]
    at = cut.num_kept + count_agreeing(draft_tokens[cut.num_kept : cut.tail_end], tail)
    bonus = tail[at - cut.num_kept]
    pending: tuple[int, ...] = ()
    if cut.reuse_tail and draft_tokens[at] == bonus:
        pending = tuple(draft_tokens[at + 1 :])
    return Decision(
        accept_tokens=(*draft_tokens[:at], bonus),
        num_judged=cut.num_kept,
        num_matched=at - cut.num_kept,
        pending=pending,
    )


def count_agreeing(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> int:
    """Leading draft tokens that equal the target's."""
    pairs = zip(draft_tokens, target_tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
