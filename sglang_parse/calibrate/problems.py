"""The problems of a calibration: the embedded task, GSM8K, or a file of the user's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_parse.calibrate.answers import check_final, check_number
from sglang_parse.embedded.task import check_answer, make_problems

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One problem. reference: what `ProblemSet.check` compares an answer with; None if
    the file has no answer for it."""

    prompt: str
    reference: Any = None


@dataclass(frozen=True)
class ProblemSet:
    """read: a row of a JSONL file -> Item. check: text, reference -> right or wrong."""

    read: Callable[[Row], Item]
    check: Callable[[str, Any], bool]
    max_new_tokens: int


def _gsm8k(row: Row) -> Item:
    boxed = "Reason step by step, and put your final answer within \\boxed{}."
    gold = row["answer"].rpartition("####")[2].strip()
    return Item(f"{row['question'].strip()}\n{boxed}", gold)


def _own(row: Row) -> Item:
    answer = row.get("answer")
    return Item(str(row["prompt"]), None if answer is None else str(answer))


PROBLEM_SETS = {
    "embedded": ProblemSet(_own, lambda text, p: check_answer(p, text), 320),
    "gsm8k": ProblemSet(_gsm8k, check_number, 1024),
    "prompts": ProblemSet(_own, check_final, 2048),
}


def load_items(name: str, *, problems: int, seed: int, path: str = "") -> list[Item]:
    """`problems` items, the same for the same arguments, drawn by seed if there are
    more. Raises ValueError if they cannot be read."""
    if name == "embedded":
        if path:
            raise ValueError(
                f"--path is {path!r} and these problems are generated; give the file "
                "as --prompts, or --dataset gsm8k with it."
            )
        return [Item(p.prompt, p) for p in make_problems(problems, seed)]
    if name == "prompts" and not path:
        raise ValueError("--dataset prompts needs a file; give it as --prompts.")
    rows = _read_rows(Path(path)) if path else _fetch_gsm8k()
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(PROBLEM_SETS[name].read(row))
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{path or name}: row {number} lacks a field or is no object "
                f"({type(e).__name__}: {e})."
            ) from e
    if problems < len(items):
        picked = sorted(random.Random(seed).sample(range(len(items)), problems))
        items = [items[i] for i in picked]
    return items


def _read_rows(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8") as f:
            return [json.loads(line) for line in f if line.strip()]
    except (OSError, ValueError) as e:
        raise ValueError(f"{str(path)!r} cannot be read as lines of JSON: {e}.") from e


def _fetch_gsm8k() -> list[Row]:
    """The test split from the Hugging Face hub or its local cache."""
    from datasets import load_dataset

    try:
        return list(load_dataset("openai/gsm8k", "main", split="test"))
    except Exception as e:  # the library raises whatever its transport raises
        reason = (str(e).splitlines() or [type(e).__name__])[0][:160]
        raise ValueError(
            f"--dataset gsm8k could not be loaded from the hub ({reason}); give its "
            "test.jsonl as --path."
        ) from e
