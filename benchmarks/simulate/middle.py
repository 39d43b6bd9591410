"""What a middle model would give that judges a small one's draft before the target.

The middle model compares the small one's tokens with its own, so its drafts stay what
they are alone. All that changes is how long a drafted token takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.simulate.costs import GpuCosts
from sglang_parse.cli.estimate import ModelShape

# Most tokens that the small model writes between two passes of the middle one.
MOST_STEPS = 12


@dataclass(frozen=True)
class Chain:
    """A pair whose draft is the middle model, and a small one before it.

    agreement: chance that the middle model writes the small one's token.
    """

    pair: GpuCosts
    small: ModelShape
    agreement: float

    @property
    def inner(self) -> GpuCosts:
        """The middle model as the small one's target, on the same cards."""
        return replace(self.pair, target=self.pair.draft, draft=self.small)

    def cycle_ms(self, steps: int, bs: int) -> float:
        """Milliseconds a token where the small model writes `steps` tokens, the middle
        one reads them in one pass, and the host looks at what agrees."""
        tokens = sum(self.agreement**k for k in range(steps + 1))
        inner = self.inner
        drafted = steps * inner.step_ms(bs)
        read = inner.pass_ms(bs * (steps + 1), bs) + inner.host_ms(bs)
        return (drafted + read) / tokens

    def best(self, bs: int) -> tuple[int, float]:
        """The best number of steps, and milliseconds a token with it."""
        found = ((n, self.cycle_ms(n, bs)) for n in range(1, MOST_STEPS + 1))
        return min(found, key=lambda one: one[1])
