"""One training loop for solver, draft and judge stages."""

import logging
import math
import random
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import embedded_answers
from benchmarks.train_pair.data import (
    Batch,
    Example,
    Examples,
    ProblemStream,
    collate,
    judged_prefixes,
    right_lines,
    wrong_lines,
)
from benchmarks.train_pair.decode import generate
from benchmarks.train_pair.model import Muon, TinyLlama
from benchmarks.train_pair.tokenizer import (
    QUESTION,
    SHORT_QUESTION,
    Encoder,
    judge_suffix,
)
from sglang_parse.embedded import task

logger = logging.getLogger(__name__)
STEP_ODDS = {4: 1, 5: 1, 6: 1, 7: 1}


@dataclass(frozen=True)
class Stage:
    """Settings of one stage; samples: draft answers, mixed in at sample_rate."""

    style: str
    steps: int
    batch: int = 32
    lr: float = 0.02
    adam_lr: float = 2e-3
    warmup: int = 50
    final: float = 0.02
    error_rate: float = 0.0
    dense_rate: float = 0.0
    other_style: float = 0.0
    suffixes: int = 0
    sample_rate: float = 0.0
    probe_weight: float = 0.0
    verdict_weight: float = 1.0
    seed: int = 0
    log_every: int = 50
    samples: dict[int, list[Example]] = field(default_factory=dict)


class Probes(nn.Module):
    """Throw-away heads: is this token wrong; is anything up to here wrong."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.taps = (round(layers * 0.625), round(layers * 0.875))
        self.heads = nn.ModuleList(nn.Linear(hidden, 2) for _ in self.taps)

    def loss(self, tapped: dict[int, Tensor], batch: Batch) -> Tensor:
        """Dense error losses on the answer tokens, errors weighted up."""
        total = torch.zeros(())
        T = batch.loss.shape[1]
        answer = torch.maximum(batch.local, batch.any_wrong) > 0
        for tap, head in zip(self.taps, self.heads, strict=True):
            x = tapped[tap][:, :T][answer].float()
            local, anywhere = head(F.rms_norm(x, x.shape[-1:])).unbind(-1)
            wrong, known = batch.wrong[answer], batch.local[answer]
            bce = F.binary_cross_entropy_with_logits(
                local, wrong, weight=known * (1 + 4 * wrong)
            )
            total = total + bce
            found = (local > 0).float()
            self.recall = (found * wrong).sum() / wrong.sum().clamp(min=1)
            right = known * (1 - wrong)
            self.alarm = (found * right).sum() / right.sum()
            total = total + F.binary_cross_entropy_with_logits(
                anywhere, batch.any_wrong[answer]
            )
        return total


def max_tokens(steps: int) -> int:
    """Longest prompt with its right answer."""
    return 25 + 21 * steps


class BatchMaker:
    """Batches of one step count, so that little is padding."""

    def __init__(self, encoder: Encoder, stage: Stage) -> None:
        self.stage = stage
        self.rng = random.Random(stage.seed)
        self.problems = ProblemStream(stage.seed + 1)
        self.examples = Examples(encoder)
        self.suffixes = [
            judge_suffix(encoder.tokenizer, question)
            for question in (QUESTION, SHORT_QUESTION)
        ]

    def batch(self) -> Batch:
        s, rng = self.stage, self.rng
        n = rng.choices(list(STEP_ODDS), list(STEP_ODDS.values()))[0]
        examples = [self.example(n) for _ in range(s.batch)]
        judged = [judged_prefixes(rng, ex, s.suffixes) for ex in examples]
        suffix = rng.choice(self.suffixes) if s.suffixes else []
        is_long = any(len(e.prompt) + len(e.answer) > max_tokens(n) for e in examples)
        width = max_tokens(n + 1) if is_long else max_tokens(n)
        return collate(examples, suffix, judged, width=-(-width // 8) * 8)

    def example(self, n: int) -> Example:
        s, rng = self.stage, self.rng
        if s.samples.get(n) and rng.random() < s.sample_rate:
            return rng.choice(s.samples[n])
        problem = self.problems.take(n)
        own = rng.random() >= s.other_style
        style = s.style if own else "BA"[s.style == "B"]
        if rng.random() < s.error_rate:
            lines = wrong_lines(problem, rng, style, rng.random() < s.dense_rate)
        else:
            lines = right_lines(problem, rng, style)
        return self.examples.from_lines(problem, lines, openers=own)


def losses(model, probes, batch: Batch, stage: Stage, yes_no: Tensor) -> list[Tensor]:
    """Losses (solver, verdict, probe), verdict accuracy, probe recall, false alarms."""
    taps = probes.taps if stage.probe_weight else ()
    hidden, tapped = model(batch.ids, batch.positions, batch.mask, taps=taps)
    T = batch.loss.shape[1]
    keep = batch.loss[:, 1:] > 0
    logits = model.logits(hidden[:, : T - 1][keep])
    out = [F.cross_entropy(logits, batch.ids[:, 1:T][keep])]
    out += [torch.zeros(())] * 3
    used = batch.verdicts >= 0
    if used.any():
        rows = hidden[torch.arange(len(hidden))[:, None], batch.verdict_rows][used]
        logits, labels = model.logits(rows), batch.verdicts[used]
        out[1] = F.cross_entropy(logits, yes_no[labels])
        verdict = logits[:, yes_no].argmax(-1)
        out[3] = (verdict == labels).float().mean().detach()
    if stage.probe_weight:
        out[2] = probes.loss(tapped, batch)
        out += [probes.recall.detach(), probes.alarm.detach()]
    return out


def schedule(step: int, stage: Stage) -> float:
    """Warm-up, then cosine down to `final`."""
    if step < stage.warmup:
        return (step + 1) / stage.warmup
    t = (step - stage.warmup) / max(1, stage.steps - stage.warmup)
    return stage.final + (1 - stage.final) * 0.5 * (1 + math.cos(math.pi * t))


def train(
    model: TinyLlama, encoder: Encoder, stage: Stage, probes=None, callback=None
) -> None:
    """Run a stage; callback(step, model) may return True to stop early."""
    maker = BatchMaker(encoder, stage)
    probes = probes or Probes(model.cfg.hidden, model.cfg.layers)
    extra = list(probes.parameters()) if stage.probe_weight else []
    optimizer = Muon(model, extra, stage.lr, stage.adam_lr)
    yes_no = torch.tensor([encoder.ids("No")[0], encoder.ids("Yes")[0]])
    start, tokens, window = time.time(), 0, []
    for step in range(stage.steps):
        batch = maker.batch()
        parts = losses(model, probes, batch, stage, yes_no)
        loss = parts[0] + stage.verdict_weight * parts[1]
        (loss + stage.probe_weight * parts[2]).backward()
        optimizer.step(schedule(step, stage))
        tokens += batch.ids.numel()
        window.append(torch.stack([p.detach() for p in parts]))
        if (step + 1) % stage.log_every == 0:
            mean = torch.stack(window).mean(0).tolist()
            logger.info(
                "step %d %.0f s %.0f tok/s %s", step + 1, time.time() - start,
                tokens / (time.time() - start), [round(x, 4) for x in mean],
            )  # fmt: skip
            window = []
        if callback and callback(step + 1, model):
            break


def sample(model, encoder: Encoder, problems, temperature=0.0, seed=0) -> list[str]:
    """Decoded answers to problems."""
    eos = encoder.tokenizer.eos_token_id
    contexts = [encoder.prompt(p.prompt) for p in problems]
    rows = generate(model, contexts, eos, temperature=temperature, seed=seed)
    return [encoder.tokenizer.decode(row) for row in rows]


def accuracy(model, encoder: Encoder, problems) -> tuple[float, float]:
    """Greedy share of right final answers, and of answers right in every segment."""
    texts = sample(model, encoder, problems)
    pairs = list(zip(problems, texts, strict=True))
    right = sum(task.check_answer(p, t) for p, t in pairs)
    clean = sum(embedded_answers.first_error(p, t) is None for p, t in pairs)
    return right / len(pairs), clean / len(pairs)
