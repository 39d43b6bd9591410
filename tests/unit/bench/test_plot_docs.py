"""The plots of the documents show the stored figures."""

import pytest

from benchmarks import plot_docs


def test_modes_are_mean_and_range_of_the_repeats():
    """Red if a line shows one repeat, or another arm's figures."""
    modes = plot_docs.modes_by_concurrency(plot_docs.RESULTS / "modes.jsonl")
    assert modes["semantic"][1] == pytest.approx((4.72, 4.72, 4.72), abs=0.01)
    assert modes["semantic"][8] == pytest.approx((2.36, 2.25, 2.49), abs=0.01)
    assert modes["exact"][32] == pytest.approx((1.62, 1.53, 1.69), abs=0.01)


def test_arms_are_of_both_runs_and_leave_the_sweep_out():
    """Red if a bar mixes in settings of the sweep, or one run alone."""
    runs = [plot_docs.RESULTS / name for name in ("embedded", "embedded_rerun")]
    arms = plot_docs.arms_at(1, runs)
    assert arms["parse"] == pytest.approx((5.43, 5.16, 5.71), abs=0.01)
    assert arms["eagle3"] == pytest.approx((2.79, 2.71, 2.87), abs=0.01)


def test_plots_name_every_arm_they_show(tmp_path, monkeypatch):
    """Red if a drawing leaves an arm out, or is not the same file twice."""
    monkeypatch.setattr("sys.argv", ["plot_docs", "--out", str(tmp_path)])
    plot_docs.main()
    speed, arms = ((tmp_path / n).read_text() for n in ("speed.svg", "arms.svg"))
    assert all(label in speed for label in plot_docs.LINES.values())
    assert all(label in arms for label in plot_docs.BARS.values())
    plot_docs.main()
    assert (tmp_path / "speed.svg").read_text() == speed
