"""What a pair would gain on a GPU, from two `config.json` files: simulated, no weights.

The shipped engine and policy run on a virtual clock with modelled costs, once with
careful and once with favourable ones. What is printed is the range between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulate.costs import Device, GpuCosts
from benchmarks.simulate.drafts import Drafts
from benchmarks.simulate.scenarios import bound
from benchmarks.simulate.shapes import ModelShape
from benchmarks.simulate.world import Scenario, World

# Memory of a card in GB.
MEMORY = {"h100": 80, "h200": 141}
# How much slower the careful costs are: draft steps, and the bandwidth of memory.
SLOWER_STEP, SLOWER_MEMORY = 1.25, 0.9
TOKENS = 6000


@dataclass(frozen=True)
class EstimateOptions:
    """What `sglang-parse estimate` asks for."""

    target: Path
    draft: Path
    gpu: str = "h200"
    tp: int = 1
    kept: float = 0.9
    agreement: float = 0.8
    concurrency: Sequence[int] = (1, 8, 32)
    segment_len: int = 40
    suffix_len: int = 24


def check(options: EstimateOptions) -> None:
    """Raises ValueError naming the flag of a value that makes no sense."""
    for flag, share in (("--kept", options.kept), ("--agreement", options.agreement)):
        if not 0 < share <= 1:
            raise ValueError(
                f"{flag} is {share}; expected a number above 0 and up to 1."
            )


def estimate(options: EstimateOptions) -> Iterator[str]:
    """The lines of the answer, as they are known."""
    check(options)
    target, draft = ModelShape.read(options.target), ModelShape.read(options.draft)
    careful, favourable = cost_range(options, target, draft)
    yield from assumptions(options, target, draft, favourable)
    yield "| requests | PARSE | token by token | bound |"
    yield "|---|---|---|---|"
    for size in options.concurrency:
        judged = [speedup(options, c, size, "semantic") for c in (careful, favourable)]
        exact = [speedup(options, c, size, "exact") for c in (careful, favourable)]
        most = [bound(c, size, options.kept) for c in (careful, favourable)]
        cells = (shown_range(x) for x in (judged, exact, most))
        yield f"| {size} | {' | '.join(cells)} |"
    yield "All figures are simulated: times the tokens/s of the target alone."


def cost_range(
    options: EstimateOptions, target: ModelShape, draft: ModelShape
) -> tuple[GpuCosts, GpuCosts]:
    """Careful costs (passes without graphs, slower steps) and favourable ones."""
    device = Device.load(options.gpu)
    slower = replace(
        device,
        layer_floor_ms=SLOWER_STEP * device.layer_floor_ms,
        bandwidth_gb_ms=SLOWER_MEMORY * device.bandwidth_gb_ms,
    )
    return (
        GpuCosts(target, draft, slower, options.tp, graphs=False),
        GpuCosts(target, draft, device, options.tp, graphs=True),
    )


def assumptions(
    options: EstimateOptions, target: ModelShape, draft: ModelShape, costs: GpuCosts
) -> Iterator[str]:
    """What the figures rest on, and whether the pair fits."""
    yield (
        f"Assumed: verdicts keep {options.kept:.0%} of a draft of 256 tokens, the "
        f"target agrees with {options.agreement:.0%} of the tokens one by one."
    )
    yield (
        f"Assumed: segments of about {options.segment_len} tokens, a judge suffix of "
        f"{options.suffix_len}, contexts of {costs.context}, 16-bit weights, "
        f"{options.gpu.upper()} x {options.tp}."
    )
    yield "Measure both shares on your own texts: `sglang-parse bench`."
    share = costs.step_ms(1) / costs.plain_ms(1)
    yield f"A step of the draft costs {share:.0%} of a step of the target (modelled)."
    weights = sum(m.weight_bytes(1e9) for m in (target, draft)) / 1e9
    room = MEMORY[options.gpu] * options.tp
    if weights > 0.8 * room:
        yield (
            f"The weights take {weights:.0f} of {room} GB and leave too little for KV: "
            "raise --tp."
        )


def speedup(
    options: EstimateOptions, costs: GpuCosts, concurrency: int, mode: str
) -> float:
    """Tokens/s over the target alone, of answers that are long."""
    length = options.segment_len
    scenario = Scenario(
        costs=costs,
        concurrency=concurrency,
        drafts=Drafts(
            options.kept, options.agreement, (max(2, length // 2), 3 * length // 2)
        ),
        answers=(2000, 4000),
        suffix_len=options.suffix_len,
        num_tokens=TOKENS * min(concurrency, 6),
        warm_tokens=300 * concurrency,
        mode=mode,
    )
    return World(scenario).run().rate * costs.plain_ms(concurrency) / concurrency


def shown_range(values: Sequence[float]) -> str:
    return f"{min(values):.1f}x to {max(values):.1f}x"
