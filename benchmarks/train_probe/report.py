"""What learning a probe gave, as Markdown."""

from __future__ import annotations

from benchmarks.train_probe.collect import Collected
from benchmarks.train_probe.fit import Fit


def report_text(found: Collected, fit: Fit, seconds: float) -> str:
    """Markdown: how the probe compares with the question on requests held out."""
    pairs = found.pairs
    lines = [
        f"{len(pairs)} pairs of {len(set(pairs.requests.tolist()))} requests; learnt "
        f"in {seconds:.1f} s from {fit.report['learning_pairs']} of them. Compared "
        f"with the question on {fit.report['held_out_requests']} other requests:\n",
        "| segmenter | pairs | invalid | AUC | agreement | true accepts "
        "| false accepts | calibration error |",
        "|---" * 8 + "|",
    ]
    for kind, row in fit.report["by_kind"].items():
        lines.append(
            f"| {found.segmenters[kind]} | {row['pairs']} | {row['invalid_pairs']} "
            f"| {row['auc']:.4f} | {row['agreement']:.2%} | {row['true_accepts']:.2%} "
            f"| {row['false_accepts']:.2%} | {row['calibration_error']:.3f} |"
        )
    lines += [
        "",
        "| segmenter | cutoff | true accepts | false accepts |",
        "|---" * 4 + "|",
    ]
    for kind, row in fit.report["by_kind"].items():
        name = found.segmenters[kind]
        for cutoff, accepts, wrong in row["roc"]:
            lines.append(f"| {name} | {cutoff:g} | {accepts:.2%} | {wrong:.2%} |")
    return "\n".join([*lines, *gold_lines(found, fit)])


def gold_lines(found: Collected, fit: Fit) -> list[str]:
    """The same held to gold labels, where the data set has these."""
    rows = {
        found.segmenters[kind]: row["gold"]
        for kind, row in fit.report["by_kind"].items()
        if "gold" in row
    }
    if not rows:
        return []
    lines = [
        "",
        "| segmenter | judge | right prefixes | accepted | wrong prefixes | accepted |",
        "|---" * 6 + "|",
    ]
    for name, row in rows.items():
        wrong = row["wrong_pairs"]
        for judge in ("question", "probe"):
            one = row[judge]
            lines.append(
                f"| {name} | {judge} | {row['pairs'] - wrong} "
                f"| {one['true_accepts']:.2%} | {wrong} | {one['false_accepts']:.2%} |"
            )
    return lines
