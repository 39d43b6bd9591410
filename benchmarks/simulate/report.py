"""Runs, rows, tables and plots of simulated figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.simulate.drafts import Drafts
from benchmarks.simulate.oracle import Setting, best_fixed, run_fixed
from benchmarks.simulate.scenarios import bound, pair_costs
from benchmarks.simulate.world import Result, Scenario, World, target_alone

Row = dict[str, Any]
KINDS = ("judged", "recovering", "followed", "plain")
# Runs of each scenario whose mean is compared; one differs from the next by a tenth.
SEEDS = 4


def bound_row(
    pair: str,
    *,
    kept: float,
    agreement: float,
    concurrency: int,
    graphs: bool,
    seeds: int,
    tokens_a_step: float = 1.0,
) -> Row:
    """One pair at one concurrency, with answers so long that prompts hardly count."""
    scenario = Scenario(
        costs=pair_costs(pair, graphs=graphs),
        concurrency=concurrency,
        drafts=Drafts(kept, agreement, tokens_a_step=tokens_a_step),
        answers=(4000, 8000),
        num_tokens=30000 if concurrency == 1 else 4000 * min(concurrency, 12),
        warm_tokens=1000 * concurrency,
    )
    runs = [World(replace(scenario, seed=seed)).run() for seed in range(seeds)]
    alone = concurrency / scenario.costs.plain_ms(concurrency)
    speedup = mean(run.rate for run in runs) / alone
    most = bound(scenario.costs, concurrency, kept)
    return {
        "pair": pair,
        "graphs": graphs,
        "kept": kept,
        "agreement": agreement,
        "concurrency": concurrency,
        "speedup": speedup,
        "bound": most,
        "share": speedup / most,
        "time": time_by_kind(runs),
    }


def time_by_kind(runs: Sequence[Result]) -> dict[str, float]:
    """Share of the time that each kind of round takes; the rest is prefills."""
    total = sum(run.ms for run in runs)
    none = (0, 0.0)
    return {
        kind: sum(run.rounds.get(kind, none)[1] for run in runs) / total
        for kind in KINDS
    }


def followed_row(
    pair: str,
    *,
    head: int,
    agreement: float,
    concurrency: int,
    graphs: bool,
    kind: str = "EAGLE-3",
) -> Row:
    """Token by token: exact mode, or a head of so many steps. kind: EAGLE-3 or MTP."""
    scenario = Scenario(
        costs=pair_costs(pair, graphs=graphs, ships_head=kind == "MTP"),
        concurrency=concurrency,
        drafts=Drafts(0.9, agreement),
        answers=(4000, 8000),
        num_tokens=12000 * min(concurrency, 4),
        warm_tokens=1000 * concurrency,
        mode="exact",
        head=head,
        head_agreement=agreement,
    )
    run, alone = World(scenario).run(), target_alone(scenario)
    return {
        "pair": pair,
        "graphs": graphs,
        "drafter": f"{kind}, {head} steps" if head else "exact mode",
        "agreement": agreement,
        "concurrency": concurrency,
        "speedup": run.rate / alone.rate,
        "time": time_by_kind([run]),
    }


def followed_table(rows: Sequence[Row], *, header: bool) -> str:
    """Markdown; all figures are simulated."""
    lines = []
    if header:
        lines = [
            "| pair | graphs | drafter | agreement | c | over the target alone "
            "| followed | plain |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for row in rows:
        lines.append(
            f"| {row['pair']} | {'on' if row['graphs'] else 'off'} | {row['drafter']} "
            f"| {row['agreement']} | {row['concurrency']} | {row['speedup']:.2f}x "
            f"| {row['time']['followed']:.0%} | {row['time']['plain']:.0%} |"
        )
    return "\n".join(lines)


def bound_table(rows: Sequence[Row], *, header: bool) -> str:
    """Markdown; all figures are simulated."""
    lines = []
    if header:
        lines = [
            "| pair | graphs | kept | c | over the target alone | bound | share | "
            + " | ".join(KINDS)
            + " |",
            "|---|---|---|---|---|---|---|" + "---|" * len(KINDS),
        ]
    for row in rows:
        times = " | ".join(f"{row['time'][kind]:.0%}" for kind in KINDS)
        lines.append(
            f"| {row['pair']} | {'on' if row['graphs'] else 'off'} | {row['kept']} "
            f"| {row['concurrency']} | {row['speedup']:.2f}x | {row['bound']:.2f}x "
            f"| {row['share']:.0%} | {times} |"
        )
    return "\n".join(lines)


def regret_row(name: str, scenario: Scenario, known: dict[str, Any]) -> Row:
    """The shipped policy against the best fixed setting.

    known: settings found before by scenario's name; what is found is added.
    """
    if name not in known:
        setting, _ = best_fixed(scenario)
        known[name] = vars(setting)
    setting = Setting(**known[name])
    seeds = [replace(scenario, seed=seed) for seed in range(SEEDS)]
    best = mean(run_fixed(one, setting).rate for one in seeds)
    runs = [World(one).run() for one in seeds]
    rate = mean(run.rate for run in runs)
    alone = mean(target_alone(one).rate for one in seeds)
    return {
        "scenario": name,
        "speedup": rate / alone,
        "oracle": best / alone,
        "setting": str(setting),
        "regret": 1 - rate / best,
        "time": time_by_kind(runs),
    }


def regret_table(rows: Sequence[Row], *, header: bool) -> str:
    """Markdown; all figures are simulated."""
    lines = []
    if header:
        lines = [
            "| scenario | policy | oracle | its setting | regret | "
            + " | ".join(KINDS)
            + " |",
            "|---|---|---|---|---|" + "---|" * len(KINDS),
        ]
    for row in rows:
        times = " | ".join(f"{row['time'][kind]:.0%}" for kind in KINDS)
        lines.append(
            f"| {row['scenario']} | {row['speedup']:.2f}x | {row['oracle']:.2f}x "
            f"| {row['setting']} | {row['regret']:.1%} | {times} |"
        )
    return "\n".join(lines)


def plot_bound(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Share of the bound by concurrency, and where the time goes, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for key in dict.fromkeys((r["pair"], r["kept"], r["graphs"]) for r in rows):
        own = [r for r in rows if (r["pair"], r["kept"], r["graphs"]) == key]
        label = f"{key[0]}, kept {key[1]}" + ("" if key[2] else ", no graphs")
        places = [str(r["concurrency"]) for r in own]
        left.plot(places, [100 * r["share"] for r in own], "o-", label=label)
    left.set(xlabel="requests", ylabel="% of the bound (simulated)", ylim=(0, 105))
    left.legend(fontsize=6)
    below = [0.0] * len(rows)
    for kind in KINDS:
        share = [100 * r["time"][kind] for r in rows]
        right.bar(range(len(rows)), share, bottom=below, label=kind)
        below = [a + b for a, b in zip(below, share, strict=True)]
    right.set(xlabel="row of the table", ylabel="% of the time (simulated)")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
