"""Train a drafter for the real model on the target's own answers.

    python -m benchmarks.train_real                       # EAGLE-3 head, 3 hours
    python -m benchmarks.train_real --minutes 10 --out DIR
    python -m benchmarks.train_real small --layers 6      # a small draft model

The answers go to `WORK/texts.jsonl`; the same command goes on from there. A third of
the time writes answers, unless there are enough. The head's state of training goes to
`WORK/state.pt`, and its folder is written at each checkpoint; the same command goes on
from both. The small draft is written at the end. Without `--out` the folders go to the
cache, where `sglang-parse models --real` finds them.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_real.fit import FitOptions, fit, held_out_length
from benchmarks.train_real.small import (
    SmallOptions,
    export_small,
    small_length,
    train_small,
)
from benchmarks.train_real.target import (
    frequent_tokens,
    load_target,
    with_draft_vocab,
)
from benchmarks.train_real.texts import Text, write_texts
from sglang_parse.models import real_models

logger = logging.getLogger("train_real")
HELD_OUT = 16  # one text in HELD_OUT is never trained on


@dataclass(frozen=True)
class Job:
    """What either drafter is trained with."""

    args: argparse.Namespace
    #: The target in float32.
    model: Any
    tokenizer: Any
    train: list[Text]
    #: Texts that are never trained on.
    test: list[Text]
    #: Folder of the drafter.
    out: Path
    #: When to stop, of time.monotonic().
    end: float


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.threads:
        torch.set_num_threads(args.threads)
    start = time.monotonic()
    end = start + 60 * args.minutes
    models = real_models(print)
    out = args.out or models.target.parent / args.drafter
    work = work_folder(args, out)
    model, tokenizer = load_target(models.target)
    texts = write_texts(
        model,
        tokenizer,
        work / "texts.jsonl",
        count=args.texts,
        longest=args.longest,
        seed=args.seed,
        until=start + (end - start) / 3,
    )
    test, train = texts[::HELD_OUT], [t for i, t in enumerate(texts) if i % HELD_OUT]
    written = sum(len(own) for _, own in train)
    logger.info("%d answers, %d tokens of training", len(texts), written)
    job = Job(args, model, tokenizer, train, test, out, end)
    if args.drafter == "small":
        fit_small(job)
    else:
        fit_head(job)


def fit_small(job: Job) -> None:
    args = job.args
    options = SmallOptions(job.out, args.layers, job.end, args.batch, args.seed)
    small = train_small(job.model, job.train, options)
    export_small(small, job.tokenizer, job.out)
    figures = small_length(small, job.test, args.batch)
    logger.info("held out: %s", json.dumps(figures))


def fit_head(job: Job) -> None:
    args = job.args
    work = work_folder(args, job.out)
    names = work / "tokens.json"  # a head that is gone on with keeps its tokens
    if not names.is_file():
        own = [own for _, own in job.train]
        found = frequent_tokens(own, args.draft_vocab, job.model.config.vocab_size)
        names.write_text(json.dumps(found.tolist()), encoding="utf-8")
    tokens = torch.tensor(json.loads(names.read_text(encoding="utf-8")))
    target = with_draft_vocab(job.model, tokens)
    options = FitOptions(
        out=job.out,
        state=work / "state.pt",
        end=job.end,
        batch=args.batch,
        seed=args.seed,
    )
    head = fit(target, job.train, job.tokenizer, options)
    figures = held_out_length(head, target, job.test)
    logger.info("held out: %s", json.dumps(figures))


def work_folder(args: argparse.Namespace, out: Path) -> Path:
    work: Path = args.work or out.parent / "head-training"
    work.mkdir(parents=True, exist_ok=True)
    return work


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", nargs="?", choices=("head", "small"), default="head")
    parser.add_argument("--out", type=Path, help="folder of the drafter")
    parser.add_argument("--work", type=Path, help="folder of answers and state")
    parser.add_argument("--minutes", type=float, default=180, help="default: 180")
    parser.add_argument(
        "--texts", type=int, default=6000, help="answers; default: 6000"
    )
    parser.add_argument(
        "--longest", type=int, default=160, help="tokens of an answer; default: 160"
    )
    parser.add_argument(
        "--draft-vocab", type=int, default=8192, help="tokens the head can draft"
    )
    parser.add_argument(
        "--layers", type=int, default=6, help="of the small draft; default: 6"
    )
    parser.add_argument("--batch", type=int, default=16, help="texts a step")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
