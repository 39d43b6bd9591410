"""Data sets: rows in their published schema -> Items with a reference to check against.

Rows come from a local file (JSON Lines, JSON, CSV or Parquet) or from the hub. Prompts
are zero-shot and end with the answer format that checkers.py reads.
"""

from __future__ import annotations

import builtins
import csv
import dataclasses
import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import bfcl
from sglang_parse.embedded.task import make_problems

Row = Mapping[str, Any]
LETTERS = "ABCDEFGHIJ"
BOXED = "Reason step by step, and put your final answer within \\boxed{}."
CHOICE = 'End with a line "Answer: X", where X is the letter of the right option.'
CODE = "Answer with one complete Python code block."
_CALLED = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\s*\(")


class DataError(ValueError):
    """A data set that cannot be had; the message says what to do."""


@dataclass(frozen=True)
class Item:
    """One problem. turns: what the user says, one after the other. reference: what its
    checker compares with, None where answers are only rated."""

    id: str
    turns: tuple[str, ...]
    reference: Any = None
    category: str = ""


@dataclass(frozen=True)
class DataSet:
    """Where a data set comes from and how its rows are read.

    read: row and its number -> Item, None for rows to leave out. checker: a key of
    checkers.CHECKERS.
    """

    name: str
    hub: str
    subset: str | None
    split: str
    read: Callable[[Row, int], Item | None]
    checker: str
    max_new_tokens: int
    gated: bool = False


def _gsm8k(row: Row, number: int) -> Item:
    gold = row["answer"].rpartition("####")[2].strip()
    prompt = f"{row['question'].strip()}\n{BOXED}"
    return Item(f"gsm8k-{number}", (prompt,), gold)


def _math500(row: Row, number: int) -> Item:
    prompt = f"{row['problem'].strip()}\n{BOXED}"
    name = str(row.get("unique_id") or f"math500-{number}")
    return Item(name, (prompt,), row["answer"], str(row.get("subject", "")))


def _nemo_skills(row: Row, number: int) -> Item:
    """NeMo-Skills's files; sgl-eval's wheel holds AIME 2024 to 2026 in this form."""
    prompt = f"{row['problem'].strip()}\n{BOXED}"
    name = str(row.get("id", f"nemo-skills-{number}"))
    return Item(name, (prompt,), str(row["expected_answer"]))


def _list(row: Row, name: str) -> list[Any]:
    """A field that holds a list. Raises TypeError where it holds something else."""
    value = row[name]
    if not isinstance(value, list | tuple):
        raise TypeError(
            f"{name!r} holds {str(value)[:40]!r}, expected a list, which a CSV file "
            "cannot hold; give JSON Lines or Parquet"
        )
    return list(value)


def _choices(question: str, options: list[str]) -> str:
    lines = [f"{letter}. {o}" for letter, o in zip(LETTERS, options, strict=False)]
    return "\n".join([question.strip(), *lines, CHOICE])


def _mmlu(row: Row, number: int) -> Item:
    prompt = _choices(row["question"], _list(row, "choices"))
    return Item(
        f"mmlu-{number}", (prompt,), LETTERS[int(row["answer"])], row.get("subject", "")
    )


def _mmlu_pro(row: Row, number: int) -> Item:
    prompt = _choices(row["question"], _list(row, "options"))
    name = f"mmlu-pro-{row.get('question_id', number)}"
    return Item(name, (prompt,), row["answer"], row.get("category", ""))


def _mmlu_redux(row: Row, number: int) -> Item | None:
    """Rows found sound, and wrong keys where the authors give the right one."""
    kind, gold = row["error_type"], str(row["answer"])
    if kind == "wrong_groundtruth":
        gold = str(row.get("correct_answer") or "")
    elif kind != "ok":
        return None
    choices = _list(row, "choices")
    if gold.isdigit() and int(gold) < len(choices):
        gold = LETTERS[int(gold)]
    if gold not in LETTERS[: len(choices)] or len(gold) != 1:
        return None
    prompt = _choices(row["question"], choices)
    return Item(f"mmlu-redux-{number}", (prompt,), gold, row.get("subject", ""))


def _gpqa(row: Row, number: int) -> Item:
    """The right option stands first in the file; its place is drawn by row number."""
    wrong = [row[f"Incorrect Answer {k}"].strip() for k in (1, 2, 3)]
    options = [row["Correct Answer"].strip(), *wrong]
    order = random.Random(f"gpqa-{number}").sample(range(4), 4)
    prompt = _choices(row["Question"], [options[i] for i in order])
    name = str(row.get("Record ID") or f"gpqa-{number}")
    return Item(name, (prompt,), LETTERS[order.index(0)], row.get("Subdomain") or "")


def _humaneval(row: Row, number: int) -> Item:
    """reference: a program's head (imports and helpers of the prompt) and its tests."""
    prompt = f"Complete this function. {CODE}\n```python\n{row['prompt']}```"
    tests = f"{row['test']}\n\ncheck({row['entry_point']})\n"
    reference = {
        "head": row["prompt"],
        "tests": tests,
        "entry_point": row["entry_point"],
    }
    return Item(row["task_id"], (prompt,), reference)


def _mbpp(row: Row, number: int) -> Item:
    example = _list(row, "test_list")[0]
    called = [n for n in _CALLED.findall(example) if not hasattr(builtins, n)]
    prompt = f"{row['prompt'].strip()} {CODE} It must pass:\n{example}"
    name = f"mbpp-{row['task_id']}"
    reference = {"head": "", "tests": row["test"]}
    return Item(name, (prompt,), reference | {"entry_point": (*called, "")[0]})


def _mt_bench(row: Row, number: int) -> Item:
    """Both published forms: FastChat's question.jsonl and the hub's."""
    turns = tuple(_list(row, "turns" if row.get("turns") else "prompt"))
    name = f"mt-bench-{row.get('question_id', row.get('prompt_id', number))}"
    reference = list(row.get("reference") or ())
    return Item(name, turns, reference, row.get("category", ""))


def _speed_bench(row: Row, number: int) -> Item:
    turns = tuple(_list(row, "turns"))
    if any(t.startswith("FULL BENCHMARK DATA SHOULD BE FETCHED") for t in turns):
        raise DataError(
            "speed-bench: the hub holds placeholders for this prompt; fill them with "
            "the preparation script on its dataset card and give the result as `path`."
        )
    name = str(row.get("question_id", number))
    return Item(name, turns, None, row.get("category", ""))


def _bfcl(row: Row, number: int) -> Item:
    """Rows of bfcl.read_rows."""
    return Item(row["id"], (bfcl.prompt_of(row),), row)


def _prompts(row: Row, number: int) -> Item:
    """A file of one's own: `prompt` (or `turns`), and perhaps `answer`."""
    turns = tuple(_list(row, "turns")) if row.get("turns") else (row["prompt"],)
    answer = row.get("answer")
    reference = None if answer is None else str(answer)
    return Item(str(row.get("id", number)), turns, reference)


_TABLE: tuple[DataSet, ...] = (
    DataSet("gsm8k", "openai/gsm8k", "main", "test", _gsm8k, "number", 1024),
    DataSet("math500", "HuggingFaceH4/MATH-500", None, "test", _math500, "math", 4096),
    DataSet("mmlu", "cais/mmlu", "all", "test", _mmlu, "choice", 2048),
    DataSet("mmlu-pro", "TIGER-Lab/MMLU-Pro", None, "test", _mmlu_pro, "choice", 4096),
    DataSet(
        *("mmlu-redux", "edinburgh-dawg/mmlu-redux-2.0", "*", "test"),
        *(_mmlu_redux, "choice", 2048),
    ),
    DataSet(
        *("gpqa-diamond", "Idavidrein/gpqa", "gpqa_diamond", "train"),
        *(_gpqa, "choice", 8192),
        gated=True,
    ),
    DataSet(
        *("humaneval-plus", "evalplus/humanevalplus", None, "test"),
        *(_humaneval, "code", 2048),
    ),
    DataSet("mbpp-plus", "evalplus/mbppplus", None, "test", _mbpp, "code", 2048),
    DataSet(
        *("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train"),
        *(_mt_bench, "rating", 2048),
    ),
    DataSet(
        *("speed-bench", "nvidia/SPEED-Bench", "qualitative", "test"),
        *(_speed_bench, "none", 1024),
    ),
    DataSet("nemo-skills", "", None, "", _nemo_skills, "math", 16384),
    DataSet("bfcl", "", None, "", _bfcl, "calls", 2048),
    DataSet("prompts", "", None, "", _prompts, "answer", 2048),
    DataSet("embedded", "", None, "", _prompts, "embedded", 320),
)
DATA_SETS = {d.name: d for d in _TABLE}


def load_items(name: str, *, problems: int, seed: int, path: str = "") -> list[Item]:
    """`problems` items (0: all), the same for the same arguments, each id once.

    They are drawn by seed where there are more. Raises DataError.
    """
    data_set = DATA_SETS[name]
    if data_set.checker == "math" and not importlib.util.find_spec("math_verify"):
        raise DataError(f"{name} needs math-verify: pip install -e '.[harness]'.")
    if name == "embedded":
        if path:
            raise DataError(
                f"embedded: path {path!r} was given, but these problems are generated; "
                "name the data set that the file holds, `prompts` for one of your own."
            )
        found = make_problems(problems or 200, seed)
        return [Item(f"embedded-{i}", (p.prompt,), p) for i, p in enumerate(found)]
    rows = read_rows(Path(path), name) if path else fetch_rows(data_set)
    items: list[Item] = []
    seen: Counter[str] = Counter()
    for number, row in enumerate(rows):
        try:
            item = data_set.read(row, number)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            raise DataError(
                f"{name}: row {number} is not in the schema of "
                f"{data_set.hub or 'a prompt file'} ({type(e).__name__}: {e})."
            ) from e
        if item is None:
            continue
        seen[item.id] += 1
        if seen[item.id] > 1:
            item = dataclasses.replace(item, id=f"{item.id} ({seen[item.id]})")
        items.append(item)
    if not items:
        raise DataError(f"{name}: no usable row in {path or data_set.hub}.")
    if problems and problems < len(items):
        picked = sorted(random.Random(seed).sample(range(len(items)), problems))
        items = [items[i] for i in picked]
    return items


def read_rows(path: Path, name: str) -> list[Row]:
    """Rows of a local file, by its ending. Raises DataError."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".jsonl": _read_jsonl,
        ".txt": _read_jsonl,  # as sgl-eval calls its files
        ".json": lambda p: json.loads(p.read_text(encoding="utf-8")),
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise DataError(
            f"{name}: path {str(path)!r} ends in {path.suffix!r}; expected one of "
            f"{', '.join(readers)}."
        )
    if name == "bfcl":
        readers[".json"] = bfcl.read_rows
    try:
        rows = readers[path.suffix](path)
    except (OSError, ValueError, csv.Error) as e:
        raise DataError(f"{name}: {str(path)!r} cannot be read: {e}.") from e
    if not isinstance(rows, list):
        raise DataError(f"{name}: {str(path)!r} holds no list of rows.")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def fetch_rows(data_set: DataSet) -> list[Row]:
    """Rows from the hub, or from its local cache. Raises DataError."""
    if not data_set.hub:
        raise DataError(f"{data_set.name} needs a file; give it as `path`.")
    try:
        import datasets

        subsets = [data_set.subset]
        if data_set.subset == "*":
            subsets = datasets.get_dataset_config_names(data_set.hub)
        rows: list[Row] = []
        for subset in subsets:
            part = datasets.load_dataset(data_set.hub, subset, split=data_set.split)
            rows += list(part)
        return rows
    except Exception as e:  # the library raises whatever its transport raises
        reason = (str(e).splitlines() or [type(e).__name__])[0][:160]
        terms = " (accept its terms there first)" if data_set.gated else ""
        raise DataError(
            f"{data_set.name} could not be loaded from the hub: {reason}. Offline, "
            f"download split {data_set.split!r} of the data set {data_set.hub}{terms} "
            "as Parquet or JSON Lines elsewhere and give the file as `path` of "
            f"`{{name: {data_set.name}, path: ...}}`."
        ) from e
