"""Named pairs and the scenarios that the policy is held to."""

from __future__ import annotations

from benchmarks.simulate.costs import (
    Costs,
    GpuCosts,
    MeasuredCosts,
    load_device,
)
from benchmarks.simulate.drafts import HOSTILE, Changing, Drafts
from benchmarks.simulate.world import Scenario
from sglang_parse.cli.estimate import ModelShape

GOOD, MIDDLING, POOR = Drafts(0.95, 0.9), Drafts(0.8, 0.8), Drafts(0.4, 0.6)
CHANGING = Changing((GOOD, POOR), every_ms=4_000)
QUALITIES: dict[str, Drafts | Changing] = {
    "good": GOOD,
    "middling": MIDDLING,
    "poor": POOR,
    "hostile": HOSTILE,
    "changing": CHANGING,
}
#: Name -> (target, draft, GPU, tensor parallelism).
PAIRS = {
    "32b+1.7b-h200": ("qwen3-32b", "qwen3-1.7b", "h200", 1),
    "32b+0.6b-h200": ("qwen3-32b", "qwen3-0.6b", "h200", 1),
    "32b+1.7b-h200-tp4": ("qwen3-32b", "qwen3-1.7b", "h200", 4),
    "32b+1.7b-h100-tp4": ("qwen3-32b", "qwen3-1.7b", "h100", 4),
    "235b+8b-h100-tp8": ("qwen3-235b-a22b", "qwen3-8b", "h100", 8),
}


def pair_costs(name: str, *, graphs: bool = True, ships_head: bool = False) -> Costs:
    """Of a named pair, or of a measured table. Raises ValueError for an unknown one."""
    if name in PAIRS:
        target, draft, gpu, tp = PAIRS[name]
        return GpuCosts(
            ModelShape.find(target),
            ModelShape.find(draft),
            load_device(gpu),
            tp,
            graphs=graphs,
            name=name,
            ships_head=ships_head,
        )
    return MeasuredCosts.load(name)


def bound(costs: Costs, concurrency: int, kept: float, window: int = 256) -> float:
    """Speed over the target alone if failures cost nothing but the tokens cut off.

    A draft of `window` tokens is judged at six boundaries in one pass, and nothing is
    written anew.
    """
    rows = concurrency * (window + 1 + 6 * 24)
    ms = window * costs.step_ms(concurrency) + costs.pass_ms(rows, concurrency)
    return (kept * window + 1) / ms * costs.plain_ms(concurrency)


def scenarios(num_tokens: int = 6000) -> dict[str, Scenario]:
    """Twenty-four: drafts good to hostile and changing, 1 to 64 requests."""
    found = {}

    def add(pair: str, quality: str, concurrency: int) -> None:
        found[f"{pair} {quality} c={concurrency}"] = Scenario(
            costs=pair_costs(pair),
            concurrency=concurrency,
            drafts=QUALITIES[quality],
            num_tokens=num_tokens * min(concurrency, 12),
        )

    for quality in QUALITIES:
        for concurrency in (1, 8, 32, 64):
            add("32b+1.7b-h200", quality, concurrency)
    for quality in ("good", "middling"):
        for concurrency in (1, 8):
            add("235b+8b-h100-tp8", quality, concurrency)
    return found
