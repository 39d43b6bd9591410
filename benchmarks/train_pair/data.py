"""Training examples: right and corrupted answers, token labels and the judge layout."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import embedded_answers
from benchmarks.embedded_answers import render_step
from benchmarks.train_pair.tokenizer import IM_END, Encoder
from sglang_parse.embedded import task
from sglang_parse.embedded.task import Problem

ERROR_ODDS = {
    "total": 6, "amount": 4, "prev": 3, "verb": 3, "name": 1,
    "index": 1, "skip": 1, "repeat": 1, "early": 1,
}  # fmt: skip
DENSE_ODDS = {"total": 2, "amount": 2, "prev": 2, "verb": 2, "name": 1}
OWN_STYLE = 0.85
Line = tuple[str, str]  # what is written, what should stand there given the text so far


@dataclass(frozen=True)
class Example:
    """One answer with labels per answer token (the end token included).

    wrong: 1 on tokens that break the step; loss: 1 where the solver learns; local: 1
    where `wrong` is known; ends: answer offsets right after each segment; first_bad:
    index of the first wrong segment or None.
    """

    prompt: list[int]
    answer: list[int]
    wrong: list[int]
    loss: list[int]
    local: list[int]
    ends: list[int]
    first_bad: int | None
    steps: int


class ProblemStream:
    """Endless training problems, by number of steps."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pools: dict[int, list[Problem]] = {}

    def take(self, steps: int) -> Problem:
        while not (pool := self.pools.setdefault(steps, [])):
            problem = task._random_problem(self.rng)
            if not task.is_held_out(problem):
                self.pools.setdefault(len(problem.events), []).append(problem)
        return pool.pop()


def pick_phrasing(rng: random.Random, style: str, i: int) -> str:
    if rng.random() < OWN_STYLE:
        return embedded_answers.own_phrasing(style, i)
    return rng.choice("BA"[style == "B"]) + rng.choice("12")


def right_lines(problem: Problem, rng: random.Random, style: str) -> list[Line]:
    phrasings = [pick_phrasing(rng, style, i + 1) for i in range(len(problem.events))]
    text = embedded_answers.render_answer(problem, phrasings)
    return [(line, line) for line in embedded_answers.split_segments(text)]


def signed(verb: str, amount: int) -> int:
    return amount if verb in task.GAINS else -amount


def in_range(total: int) -> bool:
    return 0 <= total <= task.MAX_TOTAL


def other_number(rng: random.Random, right: int, low: int, high: int) -> int:
    """A wrong value, half of the time a near miss."""
    near = [n for n in (right - 2, right - 1, right + 1, right + 2) if low <= n <= high]
    if rng.random() < 0.5:
        return rng.choice(near)
    return rng.choice([n for n in range(low, high + 1) if n != right])


def pick_errors(rng: random.Random, n: int, dense: bool) -> dict[int, str]:
    """Error kind by place 1..n+1: one error, or (dense) one in every third step."""
    if dense:
        places = [k for k in range(1, n + 1) if rng.random() < 0.35]
        return {k: pick_kind(rng, DENSE_ODDS) for k in places}
    place = rng.randint(1, n + 1)
    last = rng.choice(("answer", "extra"))
    return {place: pick_kind(rng, ERROR_ODDS) if place <= n else last}


def pick_kind(rng: random.Random, odds: dict[str, int]) -> str:
    return rng.choices(list(odds), list(odds.values()))[0]


def wrong_lines(
    problem: Problem, rng: random.Random, style: str, dense: bool = False
) -> list[Line]:
    """An answer with injected errors; later steps mostly carry on from them."""
    n = len(problem.events)
    kinds = pick_errors(rng, n, dense)
    shown, i, place, lines = problem.start, 0, 0, []
    while (i := i + 1) <= n:
        place += 1
        kind = kinds.get(place)
        if kind == "early":
            break
        if kind == "skip":
            i += 1
            if i > n:
                break
        if kind == "repeat" and i > 1:
            i -= 1
        verb, amount = problem.events[i - 1]
        should = {"i": i, "prev": shown, "verb": verb, "amount": amount}
        should["name"] = problem.name
        if kind in ("skip", "repeat"):
            should["i"] = place
        wrong = dict(should) | {"i": i}
        if not in_range(shown + signed(verb, amount)) or (
            shown != problem.totals[i - 1] and rng.random() < 0.15
        ):  # back to the right count, which does not follow from the text
            wrong["prev"] = problem.totals[i - 1]
        phrasing = pick_phrasing(rng, style, i)
        corrupt(rng, kind, wrong, phrasing)
        total = wrong["prev"] + signed(wrong["verb"], wrong["amount"])
        total = total if in_range(total) else problem.totals[i]
        should["total"] = wrong["total"] = total
        if kind == "total":
            wrong["total"] = other_number(rng, total, 0, task.MAX_TOTAL)
        elif kind in DENSE_ODDS and rng.random() < 0.25:
            wrong["total"] = problem.totals[i]  # right again, against its own operands
        written = render_step(problem, i, phrasing, **wrong)
        lines.append((written, render_step(problem, i, phrasing, **should)))
        shown = wrong["total"]
    if "extra" in kinds.values():
        lines.append(extra_line(problem, rng, style, shown, len(lines) + 1))
    return [*lines, answer_line(rng, shown, kinds, len(lines))]


def extra_line(
    problem: Problem, rng: random.Random, style: str, shown: int, place: int
) -> Line:
    """A step behind the last event, where the answer should stand; sums right."""
    options = [
        (verb, amount)
        for verb in (*task.GAINS, *task.LOSSES)
        for amount in range(1, task.MAX_AMOUNT + 1)
        if in_range(shown + signed(verb, amount))
    ]
    verb, amount = rng.choice(options)
    values = {"i": place, "prev": shown, "verb": verb, "amount": amount}
    values["total"] = shown + signed(verb, amount)
    phrasing = pick_phrasing(rng, style, place)
    written = render_step(problem, len(problem.events), phrasing, **values)
    return written, written.replace("Step", "Answer", 1)


def answer_line(rng, shown: int, kinds: dict[int, str], steps: int) -> Line:
    """The last line, wrong in its number or by coming early."""
    right = embedded_answers.ANSWER_LINE.format(total=shown)
    if "answer" in kinds.values():
        shown = other_number(rng, shown, 0, task.MAX_TOTAL)
    written = embedded_answers.ANSWER_LINE.format(total=shown)
    if kinds.get(steps + 1) in ("early", "skip"):
        right = right.replace("Answer", "Step")
    return written, right


def corrupt(rng, kind: str | None, wrong: dict, phrasing: str) -> None:
    """Put one wrong operand into the values of a step."""
    if kind == "amount":
        wrong["amount"] = other_number(rng, wrong["amount"], 1, task.MAX_AMOUNT)
    elif kind == "prev":
        wrong["prev"] = other_number(rng, wrong["prev"], 0, task.MAX_TOTAL)
    elif kind == "name":
        wrong["name"] = rng.choice([n for n in task.NAMES if n != wrong["name"]])
    elif kind == "index":
        wrong["i"] = max(1, wrong["i"] + rng.choice((-1, 1)))
    elif kind == "verb":
        flipped = task.LOSSES if wrong["verb"] in task.GAINS else task.GAINS
        verbs = set(flipped)
        if phrasing.startswith("A") and rng.random() < 0.5:
            verbs = {*task.GAINS, *task.LOSSES} - {wrong["verb"]}
        wrong["verb"] = rng.choice(sorted(verbs))


class Examples:
    """Turns lines or sampled text into labelled examples."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.eos = encoder.ids(IM_END)[0]

    def from_lines(
        self, problem: Problem, lines: list[Line], *, openers: bool = True
    ) -> Example:
        """openers False: no loss on the token that opens a phrasing (foreign style)."""
        answer, wrong, ends = [], [], []
        for written, should in lines:
            ids, gold = self.encoder.ids(written), self.encoder.ids(should)
            wrong += [int(a != b) for a, b in zip(ids, gold, strict=True)]
            answer += ids
            ends.append(len(answer))
        answer, wrong = [*answer, self.eos], [*wrong, 0]
        loss = [1 - w for w in wrong]
        if not openers:
            mask_openers(loss, ends)
        bad = embedded_answers.first_error(
            problem, "".join(written for written, _ in lines)
        )
        return Example(
            self.encoder.prompt(problem.prompt), answer, wrong,
            loss, [1] * len(answer), ends, bad, len(problem.events),
        )  # fmt: skip

    def from_sample(self, problem: Problem, text: str) -> Example:
        """A sampled answer; labels after its first wrong token are unknown."""
        segments = embedded_answers.split_segments(text)
        pieces = [self.encoder.ids(segment) for segment in segments]
        answer = [i for piece in pieces for i in piece]
        ends = [sum(map(len, pieces[: k + 1])) for k in range(len(pieces))]
        bad = embedded_answers.first_error(problem, text)
        wrong, known = [0] * len(answer), [1] * len(answer)
        if bad is not None:
            gold = embedded_answers.gold_segments(problem)
            golds = [self.encoder.ids(g) for g in gold[bad]] if bad < len(gold) else []
            start = ends[bad] - len(pieces[bad])
            good = max((common(pieces[bad], g) for g in golds), default=0)
            first = min(start + good, len(answer) - 1)
            wrong[first] = 1
            known = [int(t <= first) for t in range(len(answer))]
        whole = bad is None and len(segments) == len(problem.events) + 1
        loss = [k - w for k, w in zip(known, wrong, strict=True)]
        mask_openers(loss, ends)
        return Example(
            self.encoder.prompt(problem.prompt), [*answer, self.eos], [*wrong, 0],
            [*loss, int(whole)], [*known, int(whole)], ends, bad, len(problem.events),
        )  # fmt: skip


def mask_openers(loss: list[int], ends: list[int]) -> None:
    """Zero the loss on the first token after each "Step i:"."""
    for start, end in zip([0, *ends], ends, strict=False):
        if end - start > 4:  # not the answer line
            loss[start + 3] = 0


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass(frozen=True)
class Batch:
    """B rows of T main tokens followed by K suffixes of S tokens.

    ids, positions: [B, T + K * S]; mask: additive [B or 1, 1, N, N]; targets, loss,
    wrong, any_wrong, local: [B, T] (labels of the token there, 0 off the answer);
    verdict_rows: [B, K]; verdicts: [B, K], 1 Yes, 0 No, -1 unused.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    loss: Tensor
    wrong: Tensor
    any_wrong: Tensor
    local: Tensor
    verdict_rows: Tensor
    verdicts: Tensor


def judged_prefixes(rng: random.Random, ex: Example, count: int) -> list[int]:
    """Segments to judge after: first failing, last passing, then any others."""
    bad = len(ex.ends) if ex.first_bad is None else ex.first_bad
    first = [k for k in (bad, bad - 1) if 0 <= k < len(ex.ends)]
    others = [k for k in range(len(ex.ends)) if k not in first]
    rng.shuffle(others)
    return (first + others)[:count]


def collate(
    examples: list[Example], suffix: list[int], judged: list[list[int]], width: int = 0
) -> Batch:
    """Lay out examples; judged[b]: segments after which a suffix stands, if any."""
    B, S, K = len(examples), len(suffix), max(map(len, judged))
    T = max(width, max(len(e.prompt) + len(e.answer) for e in examples))
    N = T + K * S
    ids, positions = torch.zeros(2, B, N, dtype=torch.long)
    labels = torch.zeros(4, B, T)
    cuts = torch.zeros(B, K, dtype=torch.long)
    verdicts = torch.full((B, K), -1)
    for b, ex in enumerate(examples):
        P, n = len(ex.prompt), len(ex.prompt) + len(ex.answer)
        ids[b, :n] = torch.tensor(ex.prompt + ex.answer)
        cumulative = torch.tensor(ex.wrong).cumsum(0).clamp(max=1)
        labels[:3, b, P:n] = torch.tensor([ex.loss, ex.wrong, ex.local])
        labels[3, b, P:n] = cumulative.float()
        for k, segment in enumerate(judged[b]):
            cuts[b, k] = P + ex.ends[segment]
            verdicts[b, k] = int(ex.first_bad is None or segment < ex.first_bad)
    positions[:, :T] = torch.arange(T)
    if K:
        ids[:, T:] = torch.tensor(suffix * K)
        positions[:, T:] = (cuts[..., None] + torch.arange(S)).view(B, -1)
    rows = T + torch.arange(1, K + 1) * S - 1
    return Batch(
        ids, positions, layout_mask(T, S, cuts), labels[0], labels[1], labels[3],
        labels[2], rows.expand(B, K), verdicts,
    )  # fmt: skip


def layout_mask(T: int, S: int, cuts: Tensor) -> Tensor:
    """Additive bfloat16; suffix k sees main tokens before cuts[b, k] and itself."""
    B, K = cuts.shape
    N = T + K * S
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    owner = torch.cat((torch.full((T,), -1), torch.arange(K).repeat_interleave(S)))
    allowed = (causal & (owner[:, None] == owner[None, :])).repeat(B if K else 1, 1, 1)
    if K:
        seen = torch.arange(T) < cuts.repeat_interleave(S, 1)[..., None]
        allowed[:, T:, :T] = seen
    mask = torch.zeros(allowed.shape, dtype=torch.bfloat16)
    return mask.masked_fill_(~allowed, -1e4)[:, None]
