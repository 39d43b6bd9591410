"""Train the embedded pair and its head: python -m benchmarks.train_pair --out DIR.

--only head trains a head for the pair in --pair, --only draft-head one for its draft,
--only draft --seed 1 another draft, --only other-draft one that has another tokenizer.
Stages and measured times are in this folder's README.md.
"""

import argparse
import logging
from pathlib import Path

import torch

from benchmarks.train_pair.data import Example, Examples
from benchmarks.train_pair.export import export, export_head, load
from benchmarks.train_pair.grow import grow
from benchmarks.train_pair.model import ModelConfig, TinyLlama, block
from benchmarks.train_pair.tokenizer import Encoder, build_tokenizer
from benchmarks.train_pair.train import (
    Probes,
    Stage,
    accuracy,
    max_tokens,
    sample,
    train,
)
from benchmarks.train_pair.train_head import train_head
from sglang_parse.embedded import TARGET_PATH, task

logger = logging.getLogger(__name__)
HEAD_STEPS = 1000


def draft_samples(
    draft: TinyLlama, encoder: Encoder, count: int, seed: int
) -> dict[int, list[Example]]:
    """Labelled draft answers to training problems, greedy and at temperature 1."""
    make, out = Examples(encoder), {}
    for temperature in (0.0, 1.0):
        problems = task.make_problems(count, seed + int(temperature), "train")
        for start in range(0, count, 300):
            some = problems[start : start + 300]
            texts = sample(draft, encoder, some, temperature, seed=start)
            for problem, text in zip(some, texts, strict=True):
                example = make.from_sample(problem, text)
                n = len(problem.events)
                # One step too many still fits; what rambles on is left out.
                if len(example.prompt) + len(example.answer) <= max_tokens(n + 1):
                    out.setdefault(n, []).append(example)
    return out


def train_draft(
    encoder: Encoder, vocab: int, block_fn, seed: int = 0, steps: int = 900
) -> TinyLlama:
    """Two layers, stopped once they solve about seven problems in ten."""
    torch.manual_seed(seed)
    draft = TinyLlama(ModelConfig(vocab, 2), block_fn)
    problems = task.make_problems(200, 5, "train")

    def good_enough(step: int, model: TinyLlama) -> bool:
        if step < 250 or step % 10:
            return False
        right, _ = accuracy(model, encoder, problems)
        logger.info("draft step %d right %.3f", step, right)
        return right >= 0.72

    stage = Stage("B", steps, other_style=0.4, seed=1 + 1000 * seed)
    train(draft, encoder, stage, callback=good_enough)
    return draft


def train_target(
    encoder: Encoder, vocab: int, block_fn, draft: TinyLlama, layers: int, scale: float
) -> TinyLlama:
    """Two-layer solver, eight layers to judge, then all layers of the final depth.

    The last stages have more of the draft's answers.
    """
    torch.manual_seed(3)

    def steps(count: int) -> int:
        return max(1, int(count * scale))

    target = TinyLlama(ModelConfig(vocab, 2), block_fn)
    solver = Stage(
        "A", steps(600), other_style=0.3, error_rate=0.15, final=0.1, seed=11
    )
    train(target, encoder, solver)
    target = grow(target, 8, on_top=True)
    probes = Probes(target.cfg.hidden, 8)
    judging = {
        "error_rate": 0.5, "other_style": 0.5, "probe_weight": 0.5, "sample_rate": 0.4,
        "samples": draft_samples(draft, encoder, 2500, 100),
    }  # fmt: skip
    first = Stage(
        "A", steps(1200), lr=0.01, adam_lr=1e-3, suffixes=2, seed=12, **judging
    )
    train(target, encoder, first, probes)
    judging |= {"dense_rate": 0.4, "suffixes": 3}
    for seed, count, lr in ((13, 1000, 0.007), (14, 800, 0.006)):
        stage = Stage("A", steps(count), lr=lr, adam_lr=lr / 10, seed=seed, **judging)
        train(target, encoder, stage, probes)
    target = grow(target, layers, on_top=False)
    judging["samples"] = draft_samples(draft, encoder, 2500, 200)
    stage = Stage("A", steps(600), lr=0.003, adam_lr=3e-4, seed=15, **judging)
    train(target, encoder, stage, Probes(target.cfg.hidden, layers))
    judging["sample_rate"] = 0.5
    for seed, count, lr in ((16, 300, 0.004), (17, 600, 0.005)):
        judging["samples"] = draft_samples(draft, encoder, 4000, 100 * (seed - 13))
        stage = Stage("A", steps(count), lr=lr, adam_lr=lr / 10, seed=seed, **judging)
        train(target, encoder, stage, Probes(target.cfg.hidden, layers))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24, help="a multiple of 8")
    parser.add_argument("--scale", type=float, default=1.0, help="target steps factor")
    parser.add_argument(
        "--only", choices=("draft", "head", "draft-head", "other-draft")
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draft")
    parser.add_argument("--draft-steps", type=int, default=900, help="at most")
    parser.add_argument(
        "--pair", type=Path, default=TARGET_PATH.parent, help="for its heads"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    is_other = args.only == "other-draft"
    tokenizer = build_tokenizer(other=is_other)
    encoder, vocab = Encoder(tokenizer), -(-len(tokenizer) // 64) * 64
    compiled = torch.compile(block)
    if args.only in ("head", "draft-head"):
        name = "draft" if args.only == "draft-head" else "target"
        target = load(args.pair / name)
    else:
        draft = train_draft(encoder, vocab, compiled, args.seed, args.draft_steps)
        name = "other_draft" if is_other else "draft"
        export(draft, tokenizer, args.out / name)
        if args.only:
            return
        target = train_target(encoder, vocab, compiled, draft, args.layers, args.scale)
        export(target, tokenizer, args.out / "target")
    stage = Stage("A", max(1, int(HEAD_STEPS * args.scale)), lr=0.01, seed=21)
    head, folder = train_head(target, encoder, stage), args.only or "head"
    path = args.out / folder.replace("-", "_")
    export_head(head, tokenizer, path, target.cfg.layers)


if __name__ == "__main__":
    main()
