"""Does the simulator agree with what `bench_modes` measured on this machine?

    python -m benchmarks.bench_modes --arms semantic exact off \
        --concurrency 1 8 32 --logs logs --out rounds.jsonl
    python -m benchmarks.simulate.measure logs/parse.log --out costs.json
    python -m benchmarks.bench_modes --concurrency 1 8 32 --out modes.jsonl
    python -m benchmarks.simulate.validate modes.jsonl --costs costs.json

Each arm's speed over the target alone, measured and simulated with the table. The
table holds only for the hour in which it was measured. It also says how often the
target leaves the draft in exact mode.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.simulate.costs import Costs, MeasuredCosts, values_of
from benchmarks.simulate.drafts import Drafts
from benchmarks.simulate.world import Scenario, World, target_alone
from sglang_parse.options.server import ParseConfig

# How far a simulated ratio may be from the measured one.
WITHIN = 0.15
# The embedded pair: 70% of the drafts of 80 tokens are right
# (benchmarks/results/pair_eval.json). Nearly all that the target writes otherwise is
# the first words of a segment.
DRAFTS = Drafts(kept=0.6, agreement=0.997, segments=(13, 15))
SEGMENT_LEN = mean(DRAFTS.segments)
# Its answers, prompts and judge suffix in tokens.
ANSWERS, PROMPTS, SUFFIX_LEN = (60, 100), (40, 66), 12
ADAPTIVE = ParseConfig(segmenter="line", mode="semantic")
#: Arm of bench_modes -> mode of its requests, and its server's configuration.
ARMS = {
    "semantic": ("semantic", ADAPTIVE),
    "exact": ("exact", ADAPTIVE),
    "one-segment": ("semantic", replace(ADAPTIVE, max_segments=1, window=20)),
}


@dataclass(frozen=True)
class Compared:
    """Speed of an arm, in the same unit twice."""

    arm: str
    concurrency: int
    measured: float
    simulated: float

    @property
    def difference(self) -> float:
        return self.simulated / self.measured - 1


def measured_ratios(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Mean over the repeats of bench_modes."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row["ratio"] is not None and row["arm"] in ARMS:
            found.setdefault((row["arm"], row["concurrency"]), []).append(row["ratio"])
    return {key: mean(ratios) for key, ratios in sorted(found.items())}


def drafts_of(leaving_rate: float) -> Drafts:
    """Drafts that the target leaves at so many of the tokens that it follows."""
    at_beginnings = leaving_rate - (1 - DRAFTS.agreement) - DRAFTS.error_rate()
    return replace(DRAFTS, own_words=min(1.0, max(0.0, at_beginnings) * SEGMENT_LEN))


def scenario(costs: Costs, drafts: Drafts, concurrency: int) -> Scenario:
    """The embedded pair under the load of bench_modes, which warms up first."""
    return Scenario(
        costs,
        concurrency,
        drafts,
        answers=ANSWERS,
        prompts=PROMPTS,
        suffix_len=SUFFIX_LEN,
        num_tokens=80 * max(48, 8 * concurrency),
        warm_tokens=80 * max(8, 2 * concurrency),
    )


def compare(
    rows: Sequence[dict[str, Any]], costs: Costs, drafts: Drafts
) -> Iterator[Compared]:
    for (arm, concurrency), measured in measured_ratios(rows).items():
        mode, config = ARMS[arm]
        one = scenario(costs, drafts, concurrency)
        run = World(replace(one, mode=mode, config=config)).run()
        simulated = run.rate / target_alone(one).rate
        yield Compared(arm, concurrency, measured, simulated)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", type=Path, help="what bench_modes wrote")
    parser.add_argument(
        "--costs", type=Path, required=True, help="the table of the same hour"
    )
    args = parser.parse_args()
    lines = args.modes.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    worst = 0.0
    print(
        "| arm | requests | measured | simulated | difference |\n|---|---|---|---|---|"
    )
    costs = MeasuredCosts.read(args.costs)
    drafts = drafts_of(values_of(args.costs, "drafts")["leaving_rate"])
    for one in compare(rows, costs, drafts):
        worst = max(worst, abs(one.difference))
        print(
            f"| {one.arm} | {one.concurrency} | {one.measured:.2f}x "
            f"| {one.simulated:.2f}x | {one.difference:+.0%} |",
            flush=True,
        )
    print(f"The furthest is {worst:.0%} away; {WITHIN:.0%} is allowed.")
    raise SystemExit(worst > WITHIN)


if __name__ == "__main__":
    main()
