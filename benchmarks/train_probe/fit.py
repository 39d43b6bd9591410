"""Training a probe: pairs of (hidden states, the question's score) -> weights; pure.

Requests, not pairs, are split: what a report says holds for requests never seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Share of requests that are kept for the report, and of the others for the cutoffs.
HELD_OUT, CHOOSING = 0.25, 0.25
#: Penalties on the weights that are tried.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
MOST_ITERATIONS = 200
NUM_BINS = 10
#: What a probe learns: the question's verdicts, or the labels of a data set.
LABELS = ("question", "gold")


@dataclass(frozen=True)
class Pairs:
    """states: [n, width]. scores: [n] of the question. requests: [n] whose they are.
    kinds: [n] numbers of segmenters. gold: [n] whether a prefix is right: 1 or 0, -1
    where nobody knows; None for nowhere."""

    states: Tensor
    scores: Tensor
    requests: Tensor
    kinds: Tensor
    gold: Tensor | None = None

    def __len__(self) -> int:
        return len(self.scores)

    def at(self, chosen: Tensor) -> Pairs:
        """The pairs of a mask [n]."""
        return Pairs(
            self.states[chosen],
            self.scores[chosen],
            self.requests[chosen],
            self.kinds[chosen],
            None if self.gold is None else self.gold[chosen],
        )


@dataclass(frozen=True)
class Fit:
    """A `Probe` without what it is bound to."""

    weight: Tensor
    bias: Tensor
    #: By the number of the segmenter.
    cutoffs: dict[int, float]
    report: dict[str, Any]
    #: What it learnt, one of LABELS.
    labels: str = "question"


def known(pairs: Pairs) -> Tensor:
    """Mask [n] of the pairs whose gold label is known."""
    if pairs.gold is None:
        return torch.zeros(len(pairs), dtype=torch.bool)
    return pairs.gold >= 0


def is_right(pairs: Pairs) -> Tensor:
    """Mask [n] of the pairs that gold says are right."""
    assert pairs.gold is not None
    return torch.eq(pairs.gold, 1)


def split_requests(requests: Tensor, share: float, seed: int) -> Tensor:
    """Mask [n] of the pairs of a share of the requests."""
    names = sorted(set(requests.tolist()))
    random.Random(seed).shuffle(names)
    chosen = set(names[: round(share * len(names))])
    return torch.tensor([one in chosen for one in requests.tolist()], dtype=torch.bool)


def learn(
    pairs: Pairs,
    *,
    threshold: float,
    labels: str = "question",
    seed: int = 0,
) -> Fit:
    """Fit a linear probe.

    threshold: of the question's score. labels: what is learnt, one of LABELS; with
    `gold`, from the pairs whose label is known. Raises ValueError where there are too
    few pairs, or none of one verdict, to learn or to report from.
    """
    if labels == "gold":
        pairs = pairs.at(known(pairs))

    def wanted_of(part: Pairs) -> Tensor:
        return is_right(part) if labels == "gold" else part.scores >= threshold

    held = split_requests(pairs.requests, HELD_OUT, seed)
    rest = pairs.at(~held)
    chooses = split_requests(rest.requests, CHOOSING, seed + 1)
    parts = {
        "learning": rest.at(~chooses),
        "choosing": rest.at(chooses),
        "reporting": pairs.at(held),
    }
    for name, part in parts.items():
        num_valid = int(wanted_of(part).sum())
        if not 0 < num_valid < len(part):
            raise ValueError(
                f"{len(part)} pairs for {name} hold {num_valid} valid "
                "prefixes; expected some valid ones and some others: collect more."
            )
    learning, choosing = parts["learning"], parts["choosing"]
    mean = learning.states.float().mean(0)
    spread = learning.states.float().std(0).clamp(min=1e-4)
    targets = wanted_of(learning).float()
    wanted = wanted_of(choosing)
    tried: list[tuple[float, Tensor, Tensor, Tensor]] = []
    for penalty in PENALTIES:
        x = (learning.states.float() - mean) / spread
        weight, bias = _fit(x, targets, penalty)
        logits = (choosing.states.float() - mean) / spread @ weight + bias
        loss = float(
            torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted.float())
        )
        tried.append((loss, weight, bias, logits))
    _, weight, bias, logits = min(tried, key=lambda one: one[0])
    # The same classifier of states that are not standardised.
    weight = weight / spread
    bias = bias - weight @ mean
    cutoffs = {
        kind: choose_cutoff(
            torch.sigmoid(logits[choosing.kinds == kind]),
            wanted[choosing.kinds == kind],
        )
        for kind in sorted(set(choosing.kinds.tolist()))
    }
    held_pairs = parts["reporting"]
    held_logits = held_pairs.states.float() @ weight + bias
    scores, valid = torch.sigmoid(held_logits), held_pairs.scores >= threshold
    report: dict[str, Any] = {
        "held_out_requests": len(set(held_pairs.requests.tolist())),
        "learning_pairs": len(learning),
        "by_kind": {},
    }
    for kind, cutoff in cutoffs.items():
        mask = torch.eq(held_pairs.kinds, kind)
        if not bool(mask.any()):
            continue
        row = report_of(scores[mask], valid[mask], cutoff)
        of_kind = held_pairs.at(mask)
        if bool(known(of_kind).any()):
            row["gold"] = gold_report(scores[mask], valid[mask], of_kind, cutoff)
        report["by_kind"][kind] = row
    return Fit(weight, bias, cutoffs, report, labels)


def _fit(x: Tensor, labels: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Logistic regression on standardised states by L-BFGS: weight [width], bias []."""
    weight = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    steps = torch.optim.LBFGS(
        [weight, bias], max_iter=MOST_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        steps.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            x @ weight + bias, labels
        )
        loss = loss + penalty * (weight * weight).sum()
        loss.backward()
        return loss

    steps.step(closure)
    return weight.detach(), bias.detach()


def choose_cutoff(scores: Tensor, wanted: Tensor) -> float:
    """Cutoff of most agreement.

    scores: [n] of the probe. wanted: [n] bool, what it learnt.
    """
    order = scores.argsort()
    s, right = scores[order], wanted[order]
    rejected, accepted = _before(right), _before(~right)
    # k: the first k are called invalid.
    return _between(s, int((rejected + accepted[-1] - accepted).argmin()))


def _before(mask: Tensor) -> Tensor:
    """[n + 1] how many are set before each place of a mask [n]."""
    return torch.cat([torch.zeros(1, dtype=torch.long), mask.long().cumsum(0)])


def _between(rising: Tensor, k: int) -> float:
    """A value that the first k of the scores lie below."""
    if k == 0:
        return float(rising[0]) / 2
    if k == len(rising):
        return (float(rising[-1]) + 1) / 2
    return float(rising[k - 1] + rising[k]) / 2


def report_of(scores: Tensor, valid: Tensor, cutoff: float) -> dict[str, Any]:
    """How a probe's scores compare with the question's verdicts.

    scores: [n]. valid: [n] bool. Shares are of the pairs of one verdict.
    """
    called = scores >= cutoff
    return {
        "pairs": len(scores),
        "invalid_pairs": int((~valid).sum()),
        "auc": auc(scores, valid),
        "calibration_error": calibration_error(scores, valid),
        "agreement": _share(called == valid),
        "true_accepts": _share(called[valid]),
        "false_accepts": _share(called[~valid]),
        "roc": roc(scores, valid),
    }


def gold_report(
    scores: Tensor, asked: Tensor, pairs: Pairs, cutoff: float
) -> dict[str, Any]:
    """The question and the probe held to gold labels, where these are known.

    scores: [n] of the probe. asked: [n] bool, the question's verdicts.
    """
    among = known(pairs)
    right = is_right(pairs)[among]
    probe = (scores >= cutoff)[among]
    asked = asked[among]
    found: dict[str, Any] = {"pairs": len(right), "wrong_pairs": int((~right).sum())}
    for name, accepts in (("question", asked), ("probe", probe)):
        found[name] = {
            "true_accepts": _share(accepts[right]),
            "false_accepts": _share(accepts[~right]),
        }
    return found


def roc(scores: Tensor, valid: Tensor) -> list[tuple[float, float, float]]:
    """(cutoff, true accepts, false accepts) at some cutoffs."""
    cutoffs = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
    return [
        (c, _share(scores[valid] >= c), _share(scores[~valid] >= c)) for c in cutoffs
    ]


def auc(scores: Tensor, valid: Tensor) -> float:
    """Chance that a valid prefix scores above an invalid one; half for ties."""
    good, bad = scores[valid], scores[~valid].sort().values
    if not len(good) or not len(bad):
        return float("nan")
    below = torch.searchsorted(bad, good, right=False)
    upto = torch.searchsorted(bad, good, right=True)
    return float((below + upto).double().mean() / (2 * len(bad)))


def calibration_error(scores: Tensor, valid: Tensor) -> float:
    """Mean distance of score and share of valid prefixes, over NUM_BINS bins."""
    bins = (scores * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    error = 0.0
    for k in range(NUM_BINS):
        inside = bins == k
        if inside.any():
            gap = scores[inside].mean() - valid[inside].float().mean()
            error += float(gap.abs()) * int(inside.sum()) / len(scores)
    return error


def _share(mask: Tensor) -> float:
    return float(mask.float().mean()) if len(mask) else float("nan")
