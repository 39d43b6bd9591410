"""The table of the real model's speed: which cells are left, what a row compares."""

from benchmarks.bench_real import report, server_flags
from benchmarks.real_model import RealModels


def row(repeat: int, arm: str, rate: float, answers: list[list[int]], passes: float):
    return {
        "repeat": repeat,
        "concurrency": 4,
        "kind": "code",
        "arm": arm,
        "output_tok_s": rate,
        "output_tokens": sum(map(len, answers)),
        "problems": len(answers),
        "passes_per_answer": passes,
        "cpu_ms_a_token": 30.0 / rate,
        "latency_p50_s": 1.0,
        "ttft_p50_s": 0.25,
        "answers": answers,
    }


def test_ratios_are_to_the_target_of_the_same_repeat():
    """Red if drift becomes a ratio, or a wrong answer counts as equal."""
    same, other = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 5]], [[1, 2, 3, 4, 5], [6, 7, 8, 9, 4]]
    rows = [row(k, "target", 10.0 * k, same, 4) for k in (1, 2, 3)]
    rows += [row(k, "exact", 20.0 * k, other if k == 3 else same, 2) for k in (3, 2, 1)]
    last = report(rows).splitlines()[-1]
    assert "| 40.0 | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) | 2.00 |" in last
    assert last.endswith("| 5/6 |")
    first = report(rows).splitlines()[2]
    assert "| 20.0 | 1.00 (1.00-1.00) | 1.00 (1.00-1.00) | 1.00 |" in first


def test_arms_have_what_their_name_says(tmp_path):
    """Red if an arm is measured with another drafter than it is named for."""
    names = [tmp_path / name for name in ("target", "draft", "head")]
    models = RealModels(*names)
    arms = ("target", "exact", "eagle3", "ngram")
    flags = {arm: server_flags(arm, models) for arm in arms}
    assert "--speculative-algorithm" not in flags["target"]
    assert str(models.draft) in flags["exact"] and "exact" in flags["exact"]
    assert str(models.head) not in flags["exact"]
    assert str(models.head) in flags["eagle3"]
    assert str(models.draft) not in flags["eagle3"]
    assert flags["ngram"][-2:] == ["--speculative-parse-drafters", "ngram"]
    both = server_flags("calibrated", models)
    assert {str(models.draft), str(models.head)} <= set(both)
