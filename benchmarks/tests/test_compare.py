"""Two runs of a benchmark, compared."""

import json

import pytest

from benchmarks import compare


def figures(ratio, right=1.0, *, arm="parse", is_sweep=False, low=0.98, high=1.0):
    shares = {"accuracy": right, "accuracy_low": low, "accuracy_high": high}
    return {
        "arm": arm,
        "options": "",
        "dataset": "embedded",
        "concurrency": 8,
        "is_sweep": is_sweep,
        "answer_ratio": None if ratio is None else [ratio, ratio, ratio],
        "figures": shares if right is not None else dict.fromkeys(shares),
    }


def run(tmp_path, first, second, *more):
    folders = []
    for name, rows in (("a", first), ("b", second)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"figures": rows}))
        folders.append(str(folder))
    return compare.main([*folders, *more])


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (figures(2.0), figures(2.4), 0),
        (figures(2.4), figures(2.0), 0),
        (figures(2.0), figures(2.6), 1),
        (figures(2.6), figures(2.0), 1),
        (figures(2.0, is_sweep=True), figures(2.6, is_sweep=True), 0),
        (figures(2.0, is_sweep=True), figures(2.8, is_sweep=True), 1),
        (figures(None), figures(2.8), 0),
        (figures(2.0, None), figures(2.0, None), 0),
        (figures(2.0, None), figures(2.0), 1),
        # In one of the intervals is enough.
        (figures(2.0, 0.97, low=0.9, high=0.99), figures(2.0, 1.0), 1),
        (figures(2.0, 0.99, low=0.97, high=0.995), figures(2.0, 1.0), 0),
    ],
)
def test_apart(tmp_path, first, second, code):
    assert run(tmp_path, [first], [second]) == code
