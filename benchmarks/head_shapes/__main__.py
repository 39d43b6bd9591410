"""Tokens a pass of an EAGLE-3 head's drafts, by their shape and rows.

    python -m benchmarks.head_shapes --texts 100 --out FILE           # embedded head
    python -m benchmarks.head_shapes --real --texts 96 --out FILE     # the real model's

Shapes: a chain of n tokens; a chain that ends where the probability of all its tokens
falls below a cutoff; the same with other tokens beside its own (`beside`); a tree of
the n likeliest nodes; a tree of all nodes above a cutoff (`tree above`). Each draft
goes behind the text that the target wrote greedily, a pass verifies it, and gives one
token of the target's more. `rows` are drafted tokens a pass, `steps` forwards of the
head a pass.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.head_shapes.drafts import Chains, TextDrafts, Trees
from benchmarks.provenance import provenance
from sglang_parse.embedded import HEAD_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems

MOST = 16
# Answers of the shipped head's training, and questions that are not its own.
NUM_TRAINED, SEED, LONGEST = 12288, 7, 144
TRAINED_SEED = 2  # of the questions that the shipped head learnt from
CHAINS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16)
CUTOFFS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
#: Paths that a level goes on from, levels, nodes.
TREES = (
    *((2, 4, n) for n in (4, 6)),
    *((4, 4, n) for n in (6, 8, 12, 16)),
    *((4, 8, n) for n in (8, 12, 16, 24)),
)
#: A head, and texts: tokens, the target's features, first own token, end.
Text = tuple[Tensor, Tensor, int, int]


@dataclass
class Figures:
    """Of one shape."""

    passes: int = 0
    tokens: int = 0
    rows: int = 0
    steps: int = 0

    def told(self) -> dict[str, float]:
        sums = {"tokens": self.tokens, "rows": self.rows, "steps": self.steps}
        return {k: round(n / max(1, self.passes), 3) for k, n in sums.items()}


@dataclass
class Shapes:
    """All shapes over many texts."""

    figures: dict[str, Figures] = field(default_factory=dict)

    def add(self, drafts: TextDrafts, first: int, end: int) -> None:
        chains = Chains.of(drafts, MOST)
        counts = chains.right.sum(1)
        for n in CHAINS:
            lens = torch.full_like(counts, n)
            self._walk(f"chain {n}", counts, lens, lens - 1, first, end)
        for cutoff in CUTOFFS:
            # The first token is there already; each further one takes a step.
            lens = 1 + (chains.sums[:, :-1] >= math.log(cutoff)).sum(1)
            self._walk(f"cutoff {cutoff}", counts, lens, lens - 1, first, end)
            right, rows, steps = chains.with_others(cutoff)
            self._walk(f"beside {cutoff}", right, rows, steps, first, end)
        trees: dict[tuple[int, int], Trees] = {(8, 6): Trees.of(drafts, 8, 6)}
        for cutoff in CUTOFFS[4:]:
            right, rows = trees[8, 6].above(cutoff)
            steps = torch.full_like(right, 5)
            self._walk(f"tree above {cutoff}", right, rows, steps, first, end)
        for width, levels, n in TREES:
            if (width, levels) not in trees:
                trees[width, levels] = Trees.of(drafts, width, levels)
            right = trees[width, levels].right(n)
            lens, steps = torch.full_like(right, n), torch.full_like(right, levels - 1)
            name = f"tree {n}, {levels} levels of {width}"
            self._walk(name, right, lens, steps, first, end)

    def _walk(
        self,
        name: str,
        right: Tensor,
        lens: Tensor,
        steps: Tensor,
        first: int,
        end: int,
    ) -> None:
        """Rounds through a text, whose token `first` the prefill gives."""
        one = self.figures.setdefault(name, Figures())
        columns = torch.minimum(right, lens), lens, steps
        counts, rows, forwards = (t.tolist() for t in columns)
        at = first - 1
        while at + 2 < end:
            step = min(counts[at] + 1, end - at - 2)
            one.passes, one.tokens = one.passes + 1, one.tokens + step
            one.rows, one.steps = one.rows + rows[at], one.steps + forwards[at]
            at += step


def embedded(num: int) -> tuple[torch.nn.Module, Iterator[Text]]:
    from benchmarks.train_pair.evaluate import EVAL_SEED
    from benchmarks.train_pair.export import load, load_head
    from benchmarks.train_pair.tokenizer import Encoder, load_tokenizer
    from benchmarks.train_pair.train_head import head_batches, target_texts

    problems = make_problems(num, EVAL_SEED)
    target = load(TARGET_PATH)
    encoder = Encoder(load_tokenizer(TARGET_PATH))
    texts = target_texts(target, encoder, problems, 0.0, dtype=torch.float32)
    batches = head_batches(target, texts, 10, torch.float32)
    return load_head(HEAD_PATH, target), _texts_of(batches)


def real(num: int) -> tuple[torch.nn.Module, Iterator[Text]]:
    """The head that `sglang-parse models --real` names, and the target's answers to
    questions that the shipped one was not trained on."""
    from benchmarks.real_model import real_models
    from benchmarks.train_real.decode import answers
    from benchmarks.train_real.export import go_on_from
    from benchmarks.train_real.fit import head_batch
    from benchmarks.train_real.questions import questions
    from benchmarks.train_real.target import RealHead, load_target, with_draft_vocab
    from benchmarks.train_real.texts import contexts_of

    models = real_models(print)
    model, tokenizer = load_target(models.target, torch.float32)
    d2t = load_file(models.head / "model.safetensors")["d2t"]
    tokens = d2t + torch.arange(len(d2t))
    head = RealHead(with_draft_vocab(model, tokens))
    go_on_from(head, models.head)
    trained = {str(one) for one in questions(NUM_TRAINED, TRAINED_SEED)}
    asked = [one for one in questions(4 * num, SEED) if str(one) not in trained][:num]
    contexts = sorted(contexts_of(tokenizer, asked), key=len)
    found = answers(model, contexts, LONGEST)
    return head, _texts_of(head_batch([a], torch.float32) for a in found)


def _texts_of(batches: Iterable[object]) -> Iterator[Text]:
    for b in batches:
        columns = b.ids, b.features, b.first.tolist(), b.end.tolist()  # type: ignore[attr-defined]
        for ids, features, first, end in zip(*columns, strict=True):
            yield ids[:end], features[:end], first, end


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--real", action="store_true", help="the real model's head")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head, texts = real(args.texts) if args.real else embedded(args.texts)
    shapes = Shapes()
    with torch.no_grad():
        for ids, features, first, end in texts:
            shapes.add(TextDrafts(head, ids, features), first, end)  # type: ignore[arg-type]
    told = {name: one.told() for name, one in shapes.figures.items()}
    for name, one in told.items():
        print(f"{name:28} {one}")
    if args.out:
        found = {"a_pass": told, "texts": args.texts, "provenance": provenance()}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
