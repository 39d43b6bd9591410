"""Acceptance numbers of the shipped pair, from the exported directories (float32).

python -m benchmarks.train_pair.evaluate --n 500 --out benchmarks/results/pair_eval.json
python -m benchmarks.train_pair.evaluate --n 200 --head sglang_parse/embedded/head
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks import embedded_answers
from benchmarks.provenance import provenance
from benchmarks.train_pair.data import Examples, collate
from benchmarks.train_pair.decode import generate
from benchmarks.train_pair.export import load, load_head
from benchmarks.train_pair.model import TinyLlama
from benchmarks.train_pair.tokenizer import (
    QUESTION,
    SHORT_QUESTION,
    Encoder,
    judge_suffix,
    load_tokenizer,
)
from benchmarks.train_pair.train import sample
from benchmarks.train_pair.train_head import (
    accept_length,
    head_batches,
    target_texts,
)
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH, task
from sglang_parse.embedded.task import Problem

EVAL_SEED = 1234
Numbers = dict[str, object]


def ratio(hits: int, total: int) -> float | None:
    return round(hits / total, 5) if total else None


def answers(problems: list[Problem], texts: list[str]) -> Numbers:
    """Shares of right answers, clean answers, and where the first error stands."""
    errors = [
        embedded_answers.first_error(p, t) for p, t in zip(problems, texts, strict=True)
    ]
    right = sum(task.check_answer(p, t) for p, t in zip(problems, texts, strict=True))
    formed = sum(t.rsplit("\n", 1)[-1].startswith("Answer: ") for t in texts)
    places = [e for e in errors if e is not None]
    return {
        "right": ratio(right, len(texts)),
        "clean": ratio(len(errors) - len(places), len(texts)),
        "well_formed": ratio(formed, len(texts)),
        "first_error_at": {str(k): places.count(k) for k in sorted(set(places))},
    }


@torch.no_grad()
def verdicts(
    target: TinyLlama,
    encoder: Encoder,
    problems: list[Problem],
    texts: list[str],
    question: str = SHORT_QUESTION,
) -> list[list[float]]:
    """P(Yes) / (P(Yes) + P(No)) after every segment of each text, in PARSE's layout."""
    make, suffix = Examples(encoder), judge_suffix(encoder.tokenizer, question)
    yes_no = torch.tensor([encoder.ids("No")[0], encoder.ids("Yes")[0]])
    out: list[list[float]] = []
    for start in range(0, len(texts), 25):
        rows = slice(start, start + 25)
        pairs = zip(problems[rows], texts[rows], strict=True)
        examples = [make.from_sample(p, t) for p, t in pairs]
        judged = [list(range(len(e.ends))) for e in examples]
        batch = collate(examples, suffix, judged)
        mask = batch.mask.float()
        hidden, _ = target(batch.ids, batch.positions, mask, torch.float32)
        at = hidden[torch.arange(len(hidden))[:, None], batch.verdict_rows]
        scores = target.logits(at)[..., yes_no].softmax(-1)[..., 1].tolist()
        out += [s[: len(j)] for s, j in zip(scores, judged, strict=True)]
    return out


def judge(problems: list[Problem], texts: list[str], scores) -> Numbers:
    """Verdicts at 0.5 against the checker, over all prefixes of all texts."""
    counts = {"valid": [0, 0], "invalid": [0, 0], "first_failing": [0, 0]}
    exact = 0
    for p, text, row in zip(problems, texts, scores, strict=True):
        bad = embedded_answers.first_error(p, text)
        bad = len(row) if bad is None else bad
        for k, score in enumerate(row):
            counts["valid" if k < bad else "invalid"][0] += score > 0.5
            counts["valid" if k < bad else "invalid"][1] += 1
        if bad < len(row):
            counts["first_failing"][0] += row[bad] > 0.5
            counts["first_failing"][1] += 1
        kept = next((k for k, score in enumerate(row) if score <= 0.5), len(row))
        exact += kept == bad
    return {
        "true_accept": ratio(*counts["valid"]),
        "false_accept": ratio(*counts["invalid"]),
        "first_failing_false_accept": ratio(*counts["first_failing"]),
        "kept_prefix_exact": ratio(exact, len(texts)),
        "prefixes": {k: v[1] for k, v in counts.items()},
    }


def kept_prefix(problem: Problem, text: str, scores: list[float]) -> str:
    """Segments before the first verdict that fails."""
    segments = embedded_answers.split_segments(text)
    kept = next((k for k, score in enumerate(scores) if score <= 0.5), len(segments))
    return "".join(segments[:kept])


def parse_rounds(
    target, draft, encoder: Encoder, problems, chunk: int, rounds: int = 12
) -> list[str]:
    """End-to-end answers: draft, judge, keep, then `chunk` target tokens, and again.

    chunk cuts inside a step, so the draft must carry on a target-phrased step.
    """
    eos = encoder.tokenizer.eos_token_id
    done: list[str | None] = [None] * len(problems)
    kept = [""] * len(problems)
    for _ in range(rounds):
        live = [i for i, text in enumerate(done) if text is None]
        if not live:
            break
        left = [problems[i] for i in live]
        contexts = [_context(encoder, problems[i], kept[i]) for i in live]
        rows = generate(draft, contexts, eos)
        texts = [
            kept[i] + encoder.tokenizer.decode(r)
            for i, r in zip(live, rows, strict=True)
        ]
        scores = verdicts(target, encoder, left, texts)
        for i, text, row in zip(live, texts, scores, strict=True):
            prefix = kept_prefix(problems[i], text, row)
            kept[i] = max(kept[i], prefix, key=len)
            if prefix == text:
                done[i] = text
        live = [i for i in live if done[i] is None]
        if not live:
            break
        contexts = [_context(encoder, problems[i], kept[i]) for i in live]
        rows = generate(target, contexts, eos, max_new=chunk)
        for i, row in zip(live, rows, strict=True):
            kept[i] += encoder.tokenizer.decode(row)
            if len(row) < chunk:
                done[i] = kept[i]
    return [text or "" for text in done]


def _context(encoder: Encoder, problem: Problem, text: str) -> list[int]:
    return encoder.prompt(problem.prompt) + encoder.tokenizer.encode(
        text, add_special_tokens=False
    )


def carry_on(
    model: TinyLlama, encoder: Encoder, problems: list[Problem], style: str, cut: str
) -> Numbers:
    """Answers continued from right `style` prefixes, cut at a "boundary" or "mid"."""
    rng = random.Random(7)
    prefixes = []
    for p in problems:
        segments = embedded_answers.split_segments(
            embedded_answers.render_answer(p, style)
        )
        k = rng.randrange(1, len(segments) - 1)
        prefix = "".join(segments[:k])
        if cut == "mid":
            words = segments[k].split(" ")
            prefix += " ".join(words[: rng.randrange(2, len(words))])
        prefixes.append(prefix)
    pairs = zip(problems, prefixes, strict=True)
    contexts = [_context(encoder, p, prefix) for p, prefix in pairs]
    rows = generate(model, contexts, encoder.tokenizer.eos_token_id)
    tails = [encoder.tokenizer.decode(row) for row in rows]
    return answers(problems, [a + b for a, b in zip(prefixes, tails, strict=True)])


def hf_difference(path: Path, model: TinyLlama, ids: Tensor) -> float:
    """Largest logit difference to transformers' Llama."""
    reference = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    T = ids.shape[1]
    mask = torch.full((T, T), -1e9).triu(1)[None, None]
    with torch.no_grad():
        positions = torch.arange(T).expand(ids.shape)
        hidden, _ = model(ids, positions, mask, torch.float32)
        difference = model.logits(hidden) - reference(ids).logits
    return float(difference.abs().max())


def report(n: int, target_path: Path, draft_path: Path) -> Numbers:
    """Every acceptance number."""
    target, draft = load(target_path), load(draft_path)
    encoder = Encoder(load_tokenizer(target_path))
    problems = task.make_problems(n, EVAL_SEED)
    greedy = sample(draft, encoder, problems)
    warm = sample(draft, encoder, problems, temperature=1.0)
    own = sample(target, encoder, problems)
    score: Callable = lambda texts, question=SHORT_QUESTION: judge(  # noqa: E731
        problems, texts, verdicts(target, encoder, problems, texts, question)
    )
    ids = torch.tensor([encoder.prompt(problems[0].prompt)])
    pairs = ((target_path, target), (draft_path, draft))
    out: Numbers = {
        "n": n,
        "eval_seed": EVAL_SEED,
        "layers": [target.cfg.layers, draft.cfg.layers],
        "bytes": [(p / "model.safetensors").stat().st_size for p, _ in pairs],
        "hf_logit_difference": [hf_difference(p, m, ids) for p, m in pairs],
        "target": answers(problems, own),
        "draft": answers(problems, greedy),
        "draft_temperature_1": answers(problems, warm),
        "judge_draft_greedy": score(greedy),
        "judge_draft_temperature_1": score(warm),
        "judge_draft_greedy_long_question": score(greedy, QUESTION),
        "judge_draft_temperature_1_long_question": score(warm, QUESTION),
        "judge_target_own": score(own),
        "judge_gold_draft_style": score(
            [embedded_answers.render_answer(p, "B") for p in problems]
        ),
    }
    for cut in ("boundary", "mid"):
        for name, model, style in (("target", target, "B"), ("draft", draft, "A")):
            key = f"{name}_carries_on_{style}_{cut}"
            out[key] = carry_on(model, encoder, problems, style, cut)
    for chunk in (5, 16):
        texts = parse_rounds(target, draft, encoder, problems, chunk)
        out[f"parse_chunk_{chunk}"] = answers(problems, texts)
    return out


def head_report(n: int, target_path: Path, head_path: Path) -> Numbers:
    """Accept length of the EAGLE-3 head, on plain answers and after openings."""
    problems = task.make_problems(n, EVAL_SEED)
    encoder = Encoder(load_tokenizer(target_path))
    target = load(target_path)
    head = load_head(head_path, target)
    out: Numbers = {"n": n, "eval_seed": EVAL_SEED}
    for name, mixed in (("plain", 0.0), ("after_draft_steps", 1.0)):
        texts = target_texts(target, encoder, problems, mixed, dtype=torch.float32)
        out[name] = accept_length(head, head_batches(target, texts, 50, torch.float32))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--target", type=Path, default=TARGET_PATH)
    parser.add_argument("--draft", type=Path, default=DRAFT_PATH)
    parser.add_argument("--head", type=Path, help="measure this head, nothing else")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.head:
        numbers = head_report(args.n, args.target, args.head)
    else:
        numbers = report(args.n, args.target, args.draft)
    text = json.dumps({**numbers, "provenance": provenance()}, indent=1)
    print(text)  # noqa: T201
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
