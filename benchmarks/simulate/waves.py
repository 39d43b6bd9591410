"""Does the simulator agree with what whole servers on a GPU gave?

    python -m benchmarks.gpu.serve --pair qwen3-32b-1.7b --out DIR
    python -m benchmarks.simulate.waves DIR/serve.jsonl

The arms that share PARSE's server are simulated in the order in which they were
measured, by one policy that learns on: waves of requests that begin at once, with the
same made-up verdicts and agreement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.simulate.costs import Costs
from benchmarks.simulate.drafts import Drafts
from benchmarks.simulate.fakes import FakeTarget
from benchmarks.simulate.scenarios import PAIRS, pair_costs
from benchmarks.simulate.validate import Compared
from benchmarks.simulate.world import Scenario, World
from sglang_parse.engine.outcome import choose_cut_of
from sglang_parse.options.server import ParseConfig
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.verify.layout import VerifyPlan

# Rows of a verdict in those servers: the default question, in the shipped tokenizer.
SUFFIX_LEN = 15
# Random weights agree nowhere but where it is made up.
RANDOM = Drafts(agreement=0.0)
# As benchmarks/gpu/serve.py starts PARSE.
CONFIG = ParseConfig(segmenter="fixed:16", max_segments=16, recover_segments=0)


class PinnedTarget(FakeTarget):
    """Keeps a fixed share of all draft tokens, and agrees with a fixed number a pass.

    What a segment or a token is too long for is owed to the drafts that follow.
    """

    kept_share, accept_length = 0.9, 1.0
    _owed_kept = _owed_agreed = 0.0

    def verify(self, round: Round, plan: VerifyPlan) -> Any:
        self._agreeing: dict[int, int] = {}
        return super().verify(round, plan)

    def verdicts(self, r: RequestRound) -> list[int]:
        self._owed_kept += self.kept_share * len(r.shown)
        kept = max((b for b in r.boundaries if b <= self._owed_kept), default=0)
        self._owed_kept -= kept
        return [int(b <= kept) for b in r.boundaries]

    def sample(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[list[int], Any]:
        tokens, sampled = super().sample(round, owner, offset)
        for k, (i, j) in enumerate(zip(owner, offset, strict=True)):
            r = round.requests[i]
            if i not in self._agreeing:
                self._agreeing[i] = self._num_agreeing(r)
            if j < self._agreeing[i]:
                tokens[k] = r.draft.tokens[j]
        return tokens, sampled

    def _num_agreeing(self, r: RequestRound) -> int:
        """Leading draft tokens that the target writes itself where it is followed."""
        cut = choose_cut_of(r)
        followed = cut.exact_end
        if not (cut.exact_end or cut.num_kept or cut.rejected_end):
            followed = cut.tail_end
        if not followed:
            return 0
        self._owed_agreed += self.accept_length - 1
        agreed = min(int(self._owed_agreed), followed)
        self._owed_agreed %= 1.0
        return agreed


class Waves(World):
    """All requests of a wave begin at once, and the next wave follows the last of them.

    target: says what verdicts keep of a draft, and how far the target agrees.
    """

    def __init__(self, costs: Costs, context: int, *, alone: bool = False) -> None:
        super().__init__(
            Scenario(
                costs,
                mode="off" if alone else "semantic",
                overlaps=alone,
                prompts=(context, context),
                suffix_len=SUFFIX_LEN,
                config=CONFIG,
                drafts=RANDOM,
            )
        )
        self.target = PinnedTarget(costs, self.clock, overlaps=alone)
        self.engine.target = self.target

    def _arrive(self) -> None:
        """Nobody comes while a wave runs (`wave`)."""

    def wave(self, concurrency: int, output: int, mode: str) -> float:
        """Tokens a second of a wave."""
        self.scenario = replace(
            self.scenario, concurrency=concurrency, answers=(output, output), mode=mode
        )
        self.waiting = [self._answer() for _ in range(concurrency)]
        start_ms, start = self.clock.ms, self.tokens
        while self.waiting or self.active:
            self._step()
        return 1000 * (self.tokens - start) / (self.clock.ms - start_ms)


def compare(records: Sequence[dict[str, Any]], costs: Costs) -> list[Compared]:
    """Tokens a second of the target alone, and of the arms that PARSE's server gave, as
    in `serve.jsonl`."""
    parse: Waves | None = None
    found = []
    for r in records:
        alone = r["arm"] == "target"
        if "tokens_per_s" not in r or not (alone or "kept_fraction" in r["pinned"]):
            continue
        n, output = r["concurrency"], r["output"]
        if alone:
            world, mode = Waves(costs, r["context"], alone=True), "off"
        else:
            world = parse = parse or Waves(costs, r["context"])
            world.target.kept_share = r["pinned"]["kept_fraction"]
            world.target.accept_length = r["pinned"]["accept_length"]
            mode = r.get("fields", {}).get("parse_mode", "semantic")
        world.wave(n, output // 2, mode)
        rates = [world.wave(n, output, mode) for _ in r["waves"]]
        measured = r["tokens_per_s"]["median"]
        found.append(Compared(r["arm"], n, measured, sum(rates) / len(rates)))
    return found


def table(found: Sequence[Compared]) -> str:
    """Rows of Markdown, speeds over the target alone beside tokens a second."""
    alone = {w.concurrency: w for w in found if w.arm == "target"}
    lines = [
        "| arm | requests | measured, tokens/s | simulated | difference "
        "| over the target, measured | simulated |",
        "|---|---|---|---|---|---|---|",
    ]
    for w in found:
        own = alone.get(w.concurrency)
        ratios = ("-", "-")
        if own is not None and w is not own:
            ratios = (
                f"{w.measured / own.measured:.2f}x",
                f"{w.simulated / own.simulated:.2f}x",
            )
        cells = (w.arm, w.concurrency, f"{w.measured:.0f}", f"{w.simulated:.0f}")
        lines.append(
            f"| {' | '.join(map(str, cells))} | {w.difference:+.0%} "
            f"| {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("records", type=Path, help="serve.jsonl of benchmarks.gpu.serve")
    p.add_argument("--costs", choices=list(PAIRS), default="32b+1.7b-h200")
    p.add_argument(
        "--no-short-passes",
        action="store_true",
        help="the server that was measured ran no pass as a decode step, as none did "
        "until 27 November 2026",
    )
    args = p.parse_args()
    lines = args.records.read_text(encoding="utf-8").splitlines()
    short = not args.no_short_passes
    costs = replace(pair_costs(args.costs), short_passes=short)
    print(table(compare([json.loads(line) for line in lines], costs)))


if __name__ == "__main__":
    main()
