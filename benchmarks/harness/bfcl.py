"""BFCL v4: questions with functions to call, and the checker of the wheel `bfcl-eval`.

The wheel pins numpy 1.26 and the clients of a dozen services, so it is unpacked into a
folder instead of installed (`make build/bfcl`). Its checker is loaded from there, with
a stand-in for the table of services. Sets of one turn in Python are read; a model is
asked in the prompt, so no parser of tool calls takes part.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ASK = """You can call these functions:
{functions}

Answer with the calls that the question needs and nothing else, as a list in Python: \
[name(parameter=value), ...]. Answer [] if no function fits or a value is missing.

{question}"""
MODEL = "the model under test"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of one of its files of questions, with their `gold` and the `checker`'s
    folder. path: .../bfcl_eval/data/BFCL_v4_CATEGORY.json. Raises OSError, ValueError.
    """
    gold: dict[str, Any] = {}
    answers = path.parent / "possible_answer" / path.name
    if answers.exists():  # none for questions that no function fits
        gold = {row["id"]: row["ground_truth"] for row in _lines(answers)}
    folder = str(path.parents[2].resolve())
    return [
        {**row, "gold": gold.get(row["id"], []), "folder": folder}
        for row in _lines(path)
    ]


def prompt_of(row: Mapping[str, Any]) -> str:
    (turn,) = row["question"]
    question = "\n".join(message["content"] for message in turn)
    functions = "\n".join(json.dumps(function) for function in row["function"])
    return ASK.format(functions=functions, question=question)


def check_calls(text: str, row: Mapping[str, Any]) -> bool:
    """Whether the calls in the text are those of the gold, by the wheel's checker."""
    try:
        calls = parse_calls(text)
    except (SyntaxError, ValueError, AttributeError):
        return False
    if not row["gold"]:
        return not calls
    category = row["id"].rpartition("_")[0]
    checker, language = _checker(row["folder"])
    found = checker(row["function"], calls, row["gold"], language, category, MODEL)
    return bool(found["valid"])


def parse_calls(text: str) -> list[dict[str, dict[str, Any]]]:
    """[{name: {parameter: value}}] of a list of calls, or of one. Raises SyntaxError,
    ValueError or AttributeError where the text is something else."""
    body = ast.parse(text.strip().strip("`'").removeprefix("python").strip()).body
    (statement,) = body
    value = statement.value  # type: ignore[attr-defined]
    calls = value.elts if isinstance(value, ast.List) else [value]
    return [
        {
            ast.unparse(call.func): {
                word.arg: ast.literal_eval(word.value) for word in call.keywords
            }
        }
        for call in calls
    ]


@functools.cache
def _checker(folder: str) -> tuple[Any, Any]:
    """The wheel's function, and its name for Python."""
    table = ModuleType("bfcl_eval.constants.model_config")
    setting = SimpleNamespace(underscore_to_dot=False)
    table.MODEL_CONFIG_MAPPING = defaultdict(lambda: setting)  # type: ignore[attr-defined]
    sys.modules[table.__name__] = table
    sys.path.insert(0, folder)
    try:
        checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
        enums = importlib.import_module("bfcl_eval.constants.enums")
    finally:
        sys.path.remove(folder)
    return checker.ast_checker, enums.Language.PYTHON


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as f:
        return [json.loads(line) for line in f if line.strip()]
