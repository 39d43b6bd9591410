"""Train the EAGLE-3 head of the real model on the target's own answers.

    python -m benchmarks.train_real

The answers and the target's states go to `WORK/answers`, a file for each batch; the
same command goes on from there. The head's state of training goes to `WORK/state.pt`,
and its folder is written at each checkpoint; the same command goes on from both.
Without `--out` the folder goes to the cache, where `benchmarks.real_model` finds it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_model import real_models
from benchmarks.train_real.decode import Answer
from benchmarks.train_real.fit import FitOptions, Fitting, held_out_length
from benchmarks.train_real.target import (
    fastest_dtype,
    frequent_tokens,
    load_target,
    with_draft_vocab,
)
from benchmarks.train_real.texts import write_texts

logger = logging.getLogger("train_real")
HELD_OUT = 16  # one answer in HELD_OUT is never trained on
WRITING = 0.5  # of the time at most
MOST_THREADS = 4  # while answers are written, each has a copy of the model
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """What the head is trained with."""

    args: argparse.Namespace
    #: The target.
    model: Any
    tokenizer: Any
    train: list[Answer]
    #: Answers that are never trained on.
    test: list[Answer]
    #: Folder of the head.
    out: Path
    #: When to stop, of time.monotonic().
    end: float
    #: Of the products.
    dtype: torch.dtype


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start = time.monotonic()
    models = real_models(print)
    out = args.out or models.target.parent / "head"
    dtype = DTYPES[args.dtype] if args.dtype else fastest_dtype()
    model, tokenizer = load_target(models.target, dtype)
    found = write_texts(
        model,
        tokenizer,
        work_folder(args, out) / "answers",
        count=args.texts,
        longest=args.longest,
        seed=args.seed,
        until=start + 60 * args.minutes * WRITING,
        threads=args.threads,
    )
    torch.set_num_threads(args.threads)  # writing has set its own
    test, train = found[::HELD_OUT], [a for i, a in enumerate(found) if i % HELD_OUT]
    written = sum(len(a.own) for a in train)
    logger.info("%d answers, %d tokens of training", len(found), written)
    end = start + 60 * args.minutes
    fit_head(Job(args, model, tokenizer, train, test, out, end, dtype))


def fit_head(job: Job) -> None:
    args = job.args
    work = work_folder(args, job.out)
    names = work / "tokens.json"  # a head that is gone on with keeps its tokens
    if not names.is_file():
        own = [a.own for a in job.train]
        found = frequent_tokens(own, args.draft_vocab, job.model.config.vocab_size)
        names.write_text(json.dumps(found.tolist()), encoding="utf-8")
    tokens = torch.tensor(json.loads(names.read_text(encoding="utf-8")))
    target = with_draft_vocab(job.model, tokens)
    options = FitOptions(
        out=job.out,
        state=work / "state.pt",
        end=job.end,
        epochs=args.epochs,
        batch=args.batch,
        seed=args.seed,
        dtype=job.dtype,
        start=args.start,
    )
    head = Fitting(target, job.train, options).run(job.tokenizer)
    figures = held_out_length(head, job.test, args.batch, torch.float32)
    logger.info("held out: %s", json.dumps(figures))


def work_folder(args: argparse.Namespace, out: Path) -> Path:
    work: Path = args.work or out.parent / "head-training"
    work.mkdir(parents=True, exist_ok=True)
    return work


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the head")
    parser.add_argument(
        "--start", type=Path, help="folder of a head to go on from; default: a new one"
    )
    parser.add_argument("--work", type=Path, help="folder of answers and state")
    parser.add_argument("--minutes", type=float, default=180, help="default: 180")
    parser.add_argument(
        "--texts", type=int, default=12288, help="answers, 0.7 MB each; default: 12288"
    )
    parser.add_argument(
        "--longest", type=int, default=144, help="tokens of an answer; default: 144"
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        default=8192,
        help="tokens the head can draft; default: 8192",
    )
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--batch", type=int, default=16, help="answers of one step; default: 16"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="default: the one that is faster here"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=min(MOST_THREADS, os.cpu_count() or 1),
        help=f"default: one a CPU, {MOST_THREADS} at most",
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.start and not (args.start / "model.safetensors").is_file():
        parser.error(
            f"--start {args.start} has no model.safetensors; name a head's folder"
        )
    return args


if __name__ == "__main__":
    main()
