"""Training and acceptance of the EAGLE-3 head, on texts that the target wrote."""

import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.embedded_answers import render_answer, split_segments
from benchmarks.train_pair.data import right_lines
from benchmarks.train_pair.decode import generate
from benchmarks.train_pair.head import Eagle3Head, target_states
from benchmarks.train_pair.model import Muon, TinyLlama
from benchmarks.train_pair.tokenizer import Encoder
from benchmarks.train_pair.train import Stage, schedule
from sglang_parse.embedded.task import Problem, make_problems

logger = logging.getLogger(__name__)
DEPTH = 5  # draft steps in training
DECAY = 0.8  # weight of each further step
MAX_NEW = 128
Text = tuple[list[int], list[int]]  # context, what the target wrote after it


def opening(problem: Problem, rng: random.Random) -> list[str]:
    """Right steps, mostly in the draft's style, for the target to carry on from."""
    count = rng.randint(1, len(problem.events))
    draft, own = (right_lines(problem, rng, style) for style in "BA")
    return [rng.choices((draft, own), (4, 1))[0][k][0] for k in range(count)]


@dataclass(frozen=True)
class HeadBatch:
    """ids [B, T]; features [B, T, layers * D]; hidden [B, T, D] of the target, normed;
    first: where the target's own text begins, end: where it ends, [B]."""

    ids: Tensor
    features: Tensor
    hidden: Tensor
    first: Tensor
    end: Tensor

    @property
    def start(self) -> int:
        """The first row from which anything is drafted."""
        return int(self.first.min()) - 1

    def drafted(self, step: int) -> Tensor:
        """[B, T - start], rows of draft step `step` whose prediction counts."""
        row = torch.arange(self.start, self.ids.shape[1])
        begins = self.first[:, None] - 1 + step
        return (row >= begins) & (row + 2 < self.end[:, None])


def head_batches(
    target: TinyLlama, texts: list[Text], size: int, dtype=torch.bfloat16
) -> list[HeadBatch]:
    """Batches of texts of about one length, with the target's states."""
    texts = sorted(texts, key=lambda text: (len(text[0]) + len(text[1]), len(text[0])))
    out = []
    for at in range(0, len(texts), size):
        some = texts[at : at + size]
        end = torch.tensor([len(a) + len(b) for a, b in some])
        width = -(-int(end.max()) // 8) * 8
        rows = [a + b + [0] * (width - len(a) - len(b)) for a, b in some]
        ids = torch.tensor(rows)
        first = torch.tensor([len(a) for a, _ in some])
        out.append(HeadBatch(ids, *target_states(target, ids, dtype), first, end))
    return out


def target_texts(
    target: TinyLlama,
    encoder: Encoder,
    problems: list[Problem],
    mixed: float,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Text]:
    """The target's greedy answers, a share `mixed` of them after an opening.

    One pass over the answer that the target should give tells whether it does; only
    where it does not, the answer is decoded.
    """
    rng, eos = random.Random(seed), encoder.tokenizer.eos_token_id
    guesses: list[Text] = []
    for p in problems:
        lines = opening(p, rng) if rng.random() < mixed else []
        own = split_segments(render_answer(p, "A"))[len(lines) :]
        begun, rest = (
            [i for x in part for i in encoder.ids(x)] for part in (lines, own)
        )
        guesses.append((encoder.prompt(p.prompt) + begun, [*rest, eos]))
    out: list[Text] = []
    for batch in head_batches(target, guesses, 50, dtype):
        right = target.logits(batch.hidden).argmax(-1) == batch.ids.roll(-1, 1)
        columns = torch.arange(right.shape[1])
        own = (columns >= batch.first[:, None] - 1) & (columns < batch.end[:, None] - 1)
        rows = batch.ids.tolist(), batch.first, batch.end, (right | ~own).all(1)
        some = [(ids[:a], ids[a:b], ok) for ids, a, b, ok in zip(*rows, strict=True)]
        out += [(context, rest) for context, rest, ok in some if ok]
        if others := [context for context, _, ok in some if not ok]:
            decoded = generate(target, others, eos, MAX_NEW)
            decoded = [row + [eos][: MAX_NEW - len(row)] for row in decoded]
            out += zip(others, decoded, strict=True)
    return out


def head_loss(
    head: Eagle3Head, target: TinyLlama, batch: HeadBatch, depth: int = DEPTH
) -> list[Tensor]:
    """Weighted loss against the target's distribution; share right at each step.

    depth: draft steps that are trained.
    """
    total, weights, right = torch.zeros(()), 0.0, []
    start = batch.start
    with torch.no_grad():
        soft = target.logits(batch.hidden[:, start:]).softmax(-1)
        soft = F.pad(soft[:, 1:], (0, 0, 0, 1))  # of token i + 2 in row i
    hiddens = head.unroll(batch.ids, batch.features, depth, start)
    for step, hidden in enumerate(hiddens):
        keep = batch.drafted(step)
        weights += DECAY**step
        if not keep.any():  # short answers have no late steps
            right.append(torch.ones(()))
            continue
        logits, wanted = head.logits(hidden[keep]), soft[keep]
        total = total + DECAY**step * F.cross_entropy(logits, wanted)
        right.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
    return [total / weights, *right]


def train_head(
    target: TinyLlama, encoder: Encoder, stage: Stage, texts: int = 4000
) -> Eagle3Head:
    """A head for `target`, on its answers to `texts` training problems."""
    start = time.time()
    torch.manual_seed(stage.seed)
    problems = make_problems(texts, stage.seed, "train")
    written = target_texts(target, encoder, problems, 0.5, stage.seed)
    logger.info("head: %d texts %.0f s", len(written), time.time() - start)
    batches = head_batches(target, written, stage.batch)
    logger.info("head: features %.0f s", time.time() - start)
    head, order = Eagle3Head(target), random.Random(stage.seed)
    head.scale_fc(batches[len(batches) // 2].features)
    optimizer = Muon(head, [head.fc, head.hidden_norm], stage.lr, stage.adam_lr)
    left: list[HeadBatch] = []
    window: list[Tensor] = []
    for step in range(stage.steps):
        left = left or order.sample(batches, len(batches))
        parts = head_loss(head, target, left.pop())
        parts[0].backward()
        optimizer.step(schedule(step, stage))
        window.append(torch.stack([p.detach() for p in parts]))
        if (step + 1) % stage.log_every == 0:
            mean = [round(x, 4) for x in torch.stack(window).mean(0).tolist()]
            logger.info("head step %d %.0f s %s", step + 1, time.time() - start, mean)
            window = []
    return head


@torch.no_grad()
def accepted(head: Eagle3Head, batch: HeadBatch, width: int) -> Tensor:
    """[B, T - start]: right tokens at the front of a chain drafted after each row."""
    run = torch.ones(batch.drafted(0).shape, dtype=torch.bool)
    count = torch.zeros(run.shape, dtype=torch.long)
    wanted = batch.ids[:, batch.start :].roll(-2, 1)
    hiddens = head.unroll(batch.ids, batch.features, width, batch.start)
    for step, hidden in enumerate(hiddens):
        right = (head.guess(hidden) == wanted) & batch.drafted(step)
        run = run & F.pad(right[:, step:], (0, step))  # back to the chain's first row
        count += run
    return count


def accept_length(
    head: Eagle3Head, batches: Iterable[HeadBatch], width: int = 4
) -> dict[str, float]:
    """Greedy chains of `width` tokens, one after the other through each text.

    The target's first own token is given; a round is one target pass and yields the
    accepted tokens and one of the target's.
    """
    rounds, tokens = 0, 0
    hits = [0] * (width + 1)
    for batch in batches:
        counts = accepted(head, batch, width).tolist()
        ends = (batch.end - batch.start).tolist()
        firsts = (batch.first - 1 - batch.start).tolist()
        for row, first, end in zip(counts, firsts, ends, strict=True):
            while first + 2 < end:  # token first + 1 is known, more are to come
                step = min(row[first] + 1, end - first - 2)
                hits[row[first]] += 1
                rounds, tokens, first = rounds + 1, tokens + step, first + step
    reached = [sum(hits[k:]) for k in range(width + 1)]
    return {
        "accept_length": round(tokens / max(1, rounds), 4),
        "rounds": rounds,
        "tokens": tokens,
    } | {
        f"accept_rate_{k + 1}": round(reached[k + 1] / max(1, reached[k]), 4)
        for k in range(width)
    }
