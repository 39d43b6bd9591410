"""BFCL v4 with gold calls and wrong ones, by the checker of its wheel."""

from pathlib import Path

import pytest

from benchmarks.harness.bfcl import parse_calls
from benchmarks.harness.checkers import is_right
from benchmarks.harness.datasets import DATA_SETS, load_items

DATA = Path(__file__).parents[2] / "build" / "bfcl" / "bfcl_eval" / "data"
# Questions, and how many have gold whose first values the wheel's checker accepts.
CATEGORIES = {
    **{"simple_python": (400, 399), "multiple": (200, 200), "parallel": (200, 200)},
    **{"parallel_multiple": (200, 199), "live_simple": (258, 256)},
    **{"live_multiple": (1053, 1048), "live_parallel": (16, 16)},
}
NAME = "bfcl"


def gold_text(item, change=lambda value: value):
    """The calls of the gold as a model would write them. change: of each value."""

    def first(values):
        return plain(values[0] if isinstance(values, list) and values else values)

    def plain(value):  # in objects too, a list holds the values that are right
        if isinstance(value, dict):
            return {k: first(v) for k, v in value.items() if v != [""]}
        return [plain(v) for v in value] if isinstance(value, list) else value

    calls = []
    for call in item.reference["gold"]:
        ((name, parameters),) = call.items()
        given = {k: first(v) for k, v in parameters.items() if v[:1] != [""]}
        words = ", ".join(f"{k}={change(v)!r}" for k, v in given.items())
        calls.append(f"{name}({words})")
    return f"[{', '.join(calls)}]"


def items_of(category):
    path = DATA / f"BFCL_v4_{category}.json"
    if not path.exists():
        pytest.skip("the wheel bfcl-eval was not fetched; `make build/bfcl`")
    return load_items(NAME, problems=0, seed=0, path=str(path))


def right(item, text):
    return is_right(DATA_SETS[NAME].checker, item, text)


@pytest.mark.parametrize("category", CATEGORIES)
def test_gold_calls_are_right_and_others_are_not(category):
    """Red if gold is read wrongly, or the checker is given something else than it."""
    items = items_of(category)
    texts = [gold_text(item) for item in items]
    graded = [right(item, text) for item, text in zip(items, texts, strict=True)]
    assert (len(items), sum(graded)) == CATEGORIES[category]
    for item, text in zip(items, texts, strict=True):
        wrong = gold_text(item, lambda v: [[v]])
        assert wrong == text or not right(item, wrong)
    assert not any(right(item, "I cannot tell.") for item in items)
    assert not any(right(item, "[]") for item in items)


def test_a_call_where_none_fits_is_wrong():
    """Red if a question without a fitting function is graded as any other."""
    items = items_of("irrelevance")
    assert len(items) == 240
    assert all(right(item, "[]") for item in items)
    assert not any(right(item, "[f(x=1)]") for item in items)


def test_calls_are_read_from_what_a_model_writes():
    fenced = "```python\n[a.b(x=1, y={'k': [True, -2.5]}), c()]\n```"
    assert parse_calls(fenced) == [
        {"a.b": {"x": 1, "y": {"k": [True, -2.5]}}},
        {"c": {}},
    ]
    assert parse_calls("f(x='1')") == [{"f": {"x": "1"}}]
    for text in ("No.", "f(x=g())", "x = 3; y = 4", "[1, 2]"):
        with pytest.raises((SyntaxError, ValueError, AttributeError)):
            parse_calls(text)
