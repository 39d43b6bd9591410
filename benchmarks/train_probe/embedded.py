"""Learns the probe that is for the embedded pair, and holds it to the checker.

    python -m benchmarks.train_probe.embedded
    python -m benchmarks.train_probe.embedded --evaluate --figures FILE --drafts FOLDER

The draft answers problems of the training split, greedily and at temperature 1. The
probe learns from what the target's own pass shows at the ends of the steps. All figures
in the file are of answers that were held out. --evaluate compares a probe, the question
and `auto` on problems of the other split, also for drafts that it never saw.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.judged_samples import QUESTION, Answer, Sampler
from benchmarks.provenance import provenance
from benchmarks.train_probe.collect import Collected
from benchmarks.train_probe.fit import LABELS, Pairs, gold_report, learn
from benchmarks.train_probe.report import report_text
from benchmarks.train_probe.save import save_probe
from benchmarks.train_probe.training import probe_of
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems
from sglang_parse.probe.linear_probe import Learnt, Probe
from sglang_parse.probe.probe_file import load_probe
from sglang_parse.probe.target_fingerprint import fingerprint

PROBE_PATH = Path(__file__).with_name("embedded.safetensors")
SEED, EVAL_SEED = 29, 1234
THRESHOLD = 0.5
SEGMENTER = "step"
TEMPERATURES = (0.0, 1.0)


def pairs_of(answers: Sequence[Answer]) -> Pairs:
    """Pairs of all prefixes; an answer is a request."""
    owners = [i for i, a in enumerate(answers) for _ in a.ends]
    return Pairs(
        torch.cat([a.states for a in answers]).float(),
        torch.tensor([s for a in answers for s in a.scores]),
        torch.tensor(owners),
        torch.zeros(len(owners), dtype=torch.long),
        torch.tensor([int(right) for a in answers for right in a.right]),
    )


def train(args: argparse.Namespace, sampler: Sampler) -> Probe:
    """Learn, print the report, and return the probe."""
    problems = make_problems(args.problems, SEED, split="train")
    answers: list[Answer] = []
    for temperature in TEMPERATURES:
        answers += sampler.answers(problems, DRAFT_PATH, temperature)
    if args.save:
        torch.save([vars(a) for a in answers], args.save)
    found = Collected(
        pairs_of(answers),
        Learnt(
            fingerprint(str(TARGET_PATH)), QUESTION, tuple(sampler.suffix), THRESHOLD
        ),
        sampler.layers,
        sampler.target.cfg.hidden,
        (SEGMENTER,),
    )
    started = time.perf_counter()
    fit = learn(found.pairs, threshold=THRESHOLD, labels=args.labels, seed=SEED)
    print(report_text(found, fit, time.perf_counter() - started), flush=True)
    return probe_of(found, fit)


def evaluate(args: argparse.Namespace, sampler: Sampler, probe: Probe) -> list[Any]:
    """Question, probe and `auto` held to the checker, for each draft."""
    problems = make_problems(args.problems, EVAL_SEED, split="eval")
    drafts = [("draft", DRAFT_PATH, t) for t in TEMPERATURES]
    drafts += [(path.parent.name, path, 0.0) for path in args.drafts]
    rows = []
    for name, path, temperature in drafts:
        pairs = pairs_of(sampler.answers(problems, path, temperature))
        rows.append({"draft": name, "temperature": temperature} | compare(probe, pairs))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def compare(probe: Probe, pairs: Pairs) -> dict[str, Any]:
    """Shares of right and wrong prefixes that are accepted; of the probe also at the
    cutoff where it accepts as many right ones as the question."""
    scores, asked = probe.scores(pairs.states), pairs.scores >= THRESHOLD
    found = gold_report(scores, asked, pairs, probe.cutoffs[SEGMENTER])
    assert pairs.gold is not None
    right = torch.eq(pairs.gold, 1)
    num = round(found["question"]["true_accepts"] * int(right.sum()))
    cutoff = float(scores[right].sort(descending=True).values[max(0, num - 1)])
    wrong = scores[~right] >= cutoff
    return found | {"probe_at_the_questions_true_accepts": float(wrong.float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=PROBE_PATH)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--labels", choices=LABELS, default="question")
    parser.add_argument("--save", type=Path, help="keep the judged answers here")
    parser.add_argument("--evaluate", action="store_true", help="of --out; learn none")
    parser.add_argument(
        "--drafts", type=Path, nargs="*", default=[], help="others to evaluate with"
    )
    parser.add_argument("--figures", type=Path, help="write what --evaluate found")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sampler = Sampler()
    if not args.evaluate:
        save_probe(train(args, sampler), args.out)
        return
    rows = evaluate(args, sampler, load_probe(args.out))
    if args.figures:
        text = json.dumps({"rows": rows, "provenance": provenance()}, indent=1)
        args.figures.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
