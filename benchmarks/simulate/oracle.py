"""The best fixed setting of a scenario, found by search with full knowledge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.simulate.world import Result, Scenario, World, target_alone
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.requests.limits import longest_window
from sglang_parse.requests.round_records import Round

WINDOWS = (24, 32, 48, 64, 96, 128, 192, 256)
FOLLOWED = (4, 8, 16, 32)
RECOVERY = (5, 12, 20)
EVERY = (2, 3)


@dataclass(frozen=True)
class Setting:
    """One way to run all rounds of a server.

    window: new draft tokens a request, 0 for the target alone. recovery: the same while
    the target rewrites a segment. every: boundaries from one verdict to the next.
    """

    judged: bool = True
    window: int = 64
    recovery: int = 8
    every: int = 1

    def __str__(self) -> str:
        if not self.window:
            return "plain"
        if not self.judged:
            return f"followed {self.window}"
        return f"judged {self.window}/{self.recovery} every {self.every}"


class FixedPlanner(RoundPlanner):
    """The shipped planner with its choices replaced by a setting."""

    def __init__(self, setting: Setting, config: Any, *args: Any, **kwargs: Any):
        super().__init__(replace(config, adaptive=False), *args, **kwargs)
        self.setting = setting

    def plan(self, round: Round) -> None:
        one = self.setting
        round.judged, round.judge_every = one.judged and round.has_semantic, one.every
        for r in round:
            r.limit = longest_window(r, self.context_len)
            num_new = one.recovery if one.judged and r.state.recovering else one.window
            held = len(r.state.pending) if num_new else 0
            r.window = min(r.limit, num_new + held)
            r.by_segments = r.window > held
            r.budgets = {"model": r.window} if r.by_segments else {}
        self._fit(round)

    def adapt(self, round: Round) -> None:
        for r in round:
            r.state.follow_verdict(len(r.decision.accept_tokens), r.rejected_end)

    def observe(self, round: Round) -> None:
        """A fixed setting learns nothing."""


def run_fixed(scenario: Scenario, setting: Setting) -> Result:
    """A scenario with one setting throughout; without drafts by stock SGLang."""
    if not setting.window:
        return target_alone(scenario)
    return World(scenario, partial(FixedPlanner, setting)).run()


def best_fixed(
    scenario: Scenario, tell: Callable[[str], None] = lambda line: None
) -> tuple[Setting, Result]:
    """The setting that gives most tokens a millisecond, and its run."""

    def best(settings: Iterable[Setting]) -> tuple[Setting, Result]:
        runs = []
        for setting in settings:
            result = run_fixed(scenario, setting)
            tell(f"{setting}: {1000 * result.rate:.0f} tokens/s")
            runs.append((setting, result))
        return max(runs, key=lambda run: run[1].rate)

    candidates = [Setting(window=w) for w in WINDOWS if w * scenario.concurrency < 8192]
    judged, result = best(candidates)
    for refined in (
        [replace(judged, recovery=v) for v in RECOVERY],
        [replace(judged, every=v) for v in EVERY],
    ):
        other, run = best(refined)
        if run.rate > result.rate:
            judged, result = other, run
    rest = [Setting(judged=False, window=w) for w in (0, *FOLLOWED)]
    other, run = best(rest)
    return (other, run) if run.rate > result.rate else (judged, result)
