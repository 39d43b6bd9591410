"""Could a draft stop where it is about to be rejected, from its own hidden state?

    python -m benchmarks.train_probe.embedded --save answers.pt --out heads
    python -m benchmarks.stop_early answers.pt --out benchmarks/results/stop_early.json

A linear probe reads the draft's hidden state at each drafted token, and learns whether
the token lies behind the last prefix that the question accepts. A draft then stops at
the first token whose score is below a cutoff. On answers that were held out, for drafts
of at most so many tokens: drafted tokens that are saved, and kept tokens that are lost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.judged_samples import Answer
from benchmarks.provenance import provenance
from benchmarks.train_probe.fit import Fit, Pairs, learn, split_requests

THRESHOLD = 0.5
WINDOWS = (32, 64, 320)
CUTOFFS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.8)
HELD_OUT, SEED = 0.3, 7


@dataclass(frozen=True)
class Sums:
    """drafted, kept: tokens without early stops. saved: of the drafted, lost: of the
    kept, those behind the stop. stopped: share of the drafts that stop early."""

    drafted: int
    kept: int
    saved: int
    lost: int
    stopped: float


def num_kept(answer: Answer, window: int) -> int:
    """Tokens up to the last boundary within the window before the first rejected."""
    kept = 0
    for end, score in zip(answer.ends, answer.scores, strict=True):
        if end > window or score < THRESHOLD:
            break
        kept = end
    return kept


def valid_tokens(answer: Answer) -> Tensor:
    """[tokens] bool: not behind the last prefix that the question accepts."""
    kept = num_kept(answer, answer.ends[-1])
    return torch.arange(answer.ends[-1]) < kept


def fit(answers: Sequence[Answer]) -> Fit:
    """A linear probe of the draft's hidden states."""
    valid = [valid_tokens(a) for a in answers]
    owners = [torch.full((len(v),), i) for i, v in enumerate(valid)]
    states = torch.cat([a.draft_states for a in answers]).float()
    labels = torch.cat(valid).float()
    kinds = torch.zeros(len(labels), dtype=torch.long)
    pairs = Pairs(states, labels, torch.cat(owners), kinds)
    return learn(pairs, threshold=THRESHOLD, seed=SEED)


def stops_at(scores: Tensor, cutoff: float, window: int) -> int:
    """Tokens of a draft that stops at the first score below the cutoff."""
    low = (scores[:window] < cutoff).nonzero()
    return int(low[0]) if len(low) else min(window, len(scores))


def sums(
    answers: Sequence[Answer], scores: Sequence[Tensor], cutoff: float, window: int
) -> Sums:
    """Over all answers, each drafted from its first token on."""
    drafted = kept = saved = lost = stopped = 0
    for answer, own in zip(answers, scores, strict=True):
        num, stop = min(window, len(own)), stops_at(own, cutoff, window)
        drafted += num
        saved += num - stop
        kept += num_kept(answer, window)
        lost += num_kept(answer, window) - num_kept(answer, min(window, stop))
        stopped += stop < num
    return Sums(drafted, kept, saved, lost, stopped / len(answers))


def run(answers: Sequence[Answer]) -> dict[str, Any]:
    """Learn from some answers, and count on the others."""
    held = split_requests(torch.arange(len(answers)), HELD_OUT, SEED).tolist()
    learning = [a for a, out in zip(answers, held, strict=True) if not out]
    rest = [a for a, out in zip(answers, held, strict=True) if out]
    found = fit(learning)
    scores = [
        torch.sigmoid(a.draft_states.float() @ found.weight + found.bias) for a in rest
    ]
    rows = [
        {"window": w, "cutoff": c} | vars(sums(rest, scores, c, w))
        for w in WINDOWS
        for c in CUTOFFS
    ]
    return {
        "auc": found.report["by_kind"][0]["auc"],
        "answers": len(rest),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("answers", type=Path, help="of train_probe.embedded --save")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    answers = [Answer(**one) for one in torch.load(args.answers)]
    found = run(answers)
    for row in found["rows"]:
        print(json.dumps(row), flush=True)
    print(f"AUC {found['auc']:.4f} on {found['answers']} answers", flush=True)
    if args.out:
        text = json.dumps(found | {"provenance": provenance()}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
