"""`train`: a probe from the verdicts of a running server.

The server writes pairs of hidden states and verdicts of the judge's question. They come
from problems, which are asked here, or from the server's own traffic. A probe that is
worse than asked is not written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.train_probe.collect import (
    Collected,
    ask_items,
    read_pairs,
)
from benchmarks.train_probe.fit import LABELS, Fit, learn
from benchmarks.train_probe.report import report_text
from benchmarks.train_probe.save import save_probe
from sglang_parse.calibrate.problems import Item, load_items
from sglang_parse.options.table import flag_name
from sglang_parse.options.validation import check_choice, check_count, check_number
from sglang_parse.probe.linear_probe import Probe


@dataclass(frozen=True)
class TrainOptions:
    """least_agreement: with the question, on requests held out. most_false_accepts:
    share of the prefixes that the question rejects. prompts: a file to ask, "" for the
    embedded task. pairs: the server's file. from_traffic: whether the pairs are there
    already. labels: what is learnt, the question's verdicts or the gold labels of the
    embedded task.
    """

    url: str
    out: Path
    pairs: Path
    prompts: str = ""
    problems: int = 1000
    from_traffic: bool = False
    temperatures: tuple[float, ...] = (0.0, 1.0)
    segmenters: tuple[str, ...] = ()
    concurrency: int = 8
    max_new_tokens: int = 2048
    labels: str = "question"
    least_agreement: float = 0.95
    most_false_accepts: float = 0.1
    seed: int = 11
    api_key: str = ""
    chat_template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(self.labels, "--labels", LABELS)
        if self.labels == "gold" and (self.from_traffic or self.prompts):
            raise ValueError(
                "--labels is 'gold', and prefixes of --prompts and --from-traffic have "
                "no gold labels; expected 'question'."
            )
        for name in ("problems", "concurrency"):
            check_count(getattr(self, name), f"--{name}", 1, 1 << 20)
        for name in ("least_agreement", "most_false_accepts"):
            flag = "--" + name.replace("_", "-")
            check_number(getattr(self, name), flag, 0.0, 1.0)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def run_training(options: TrainOptions, items: Sequence[Item] | None = None) -> str:
    """Collect, learn, write the probe, and return the report.

    items: of the data set, to ask instead of those that the options name. Raises
    ValueError where the probe is worse than asked, where there are too few pairs, or
    where the server keeps none; LoadError where the server fails.
    """
    found = collect(options, items)
    started = time.perf_counter()
    fit = learn(
        found.pairs,
        threshold=found.learnt.threshold,
        labels=options.labels,
        seed=options.seed,
    )
    seconds = time.perf_counter() - started
    text = report_text(found, fit, seconds)
    if told := shortfall(options, found, fit):
        raise ValueError(f"{text}\n{told}")
    save_probe(probe_of(found, fit), options.out)
    return (
        f"{text}\nWrote {options.out}; start the server with {flag_name('probe')} "
        f"{options.out}."
    )


def collect(options: TrainOptions, items: Sequence[Item] | None) -> Collected:
    """The server's pairs: of its traffic, or of the items, which it is asked."""
    if options.from_traffic:
        return read_pairs(options.pairs, {})
    if items is None:
        items = load_items(
            options.prompts, problems=options.problems, seed=options.seed
        )
    return read_pairs(options.pairs, ask_items(options, items))


def shortfall(options: TrainOptions, found: Collected, fit: Fit) -> str:
    """Why the probe is not written, as one sentence, or ""."""
    for kind, name in enumerate(found.segmenters):
        row = fit.report["by_kind"].get(kind)
        if kind not in fit.cutoffs or row is None:
            return f"No probe is written: there are too few pairs of {name!r}."
        if not row["agreement"] >= options.least_agreement:
            return (
                f"No probe is written: under {name!r} it agrees with the question at "
                f"{row['agreement']:.2%} of the boundaries, and --least-agreement is "
                f"{options.least_agreement:g}."
            )
        if not row["false_accepts"] <= options.most_false_accepts:
            return (
                f"No probe is written: under {name!r} it accepts "
                f"{row['false_accepts']:.2%} of what the question rejects, and "
                f"--most-false-accepts is {options.most_false_accepts:g}."
            )
    return ""


def probe_of(found: Collected, fit: Fit) -> Probe:
    """The probe with what it is bound to, and the figures of its report."""
    rows = fit.report["by_kind"]
    return Probe(
        learnt=found.learnt,
        layers=found.layers,
        hidden_size=found.hidden_size,
        cutoffs={found.segmenters[k]: cutoff for k, cutoff in fit.cutoffs.items()},
        weight=fit.weight,
        bias=fit.bias,
        figures={
            "labels": fit.labels,
            "held_out_requests": fit.report["held_out_requests"],
            "learning_pairs": fit.report["learning_pairs"],
            "by_segmenter": {
                found.segmenters[kind]: {k: v for k, v in row.items() if k != "roc"}
                for kind, row in rows.items()
            },
        },
    )
