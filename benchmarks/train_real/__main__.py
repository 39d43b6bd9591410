"""Train an EAGLE-3 head for the real model on the target's own answers.

    python -m benchmarks.train_real                       # 3 hours, into the cache
    python -m benchmarks.train_real --minutes 10 --out DIR

The answers go to `WORK/texts.jsonl` and the state of training to `WORK/state.pt`; the
same command goes on from both. A third of the time writes answers. The head is
written to `--out` at each checkpoint. Without `--out` that is the cache folder where
`sglang-parse models --real` finds it.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import torch

from benchmarks.train_real.fit import FitOptions, fit, held_out_length
from benchmarks.train_real.target import (
    frequent_tokens,
    load_target,
    with_draft_vocab,
)
from benchmarks.train_real.texts import write_texts
from sglang_parse.models import real_models

logger = logging.getLogger("train_real")
HELD_OUT = 16  # one text in HELD_OUT is never trained on


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.threads:
        torch.set_num_threads(args.threads)
    start = time.monotonic()
    end = start + 60 * args.minutes
    models = real_models(print)
    out = args.out or models.target.parent / "head"
    work = args.work or out.parent / "head-training"
    work.mkdir(parents=True, exist_ok=True)
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
    names = work / "tokens.json"  # a head that is gone on with keeps its tokens
    if not names.is_file():
        own = [own for _, own in train]
        found = frequent_tokens(own, args.draft_vocab, model.config.vocab_size)
        names.write_text(json.dumps(found.tolist()), encoding="utf-8")
    tokens = torch.tensor(json.loads(names.read_text(encoding="utf-8")))
    target = with_draft_vocab(model, tokens)
    options = FitOptions(
        out=out, state=work / "state.pt", end=end, batch=args.batch, seed=args.seed
    )
    head = fit(target, train, tokenizer, options)
    figures = held_out_length(head, target, test)
    logger.info("held out: %s", json.dumps(figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the head")
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
    parser.add_argument("--batch", type=int, default=16, help="texts a step")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
