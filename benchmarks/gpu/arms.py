"""What is measured of whole servers.

Arms: `target` (stock SGLang), `standalone` and `sglang-eagle3` (SGLang's own
speculative decoding with the same draft or head, accept length pinned by SGLang), and
`parse-F` (PARSE with the judge of `pinned_judge/`, which keeps the share F of a draft
of the full window on average). `hostile` is a draft of which nothing is kept. `rounds`
is PARSE with the times of its rounds in its log, which `benchmarks.simulate.measure`
reads. Arms with the same flags share a server.

Nothing pins how often PARSE's target agrees with a draft token by token, so that no arm
measures `exact` mode or an EAGLE-3 head under PARSE on random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.pairs import PAIRS, head_folder, model_args

# Draft tokens a step of SGLang's own arms, and the agreement per token there.
CHAIN = 5
AGREEMENT = 0.8
# The package that holds the judge, and the switch of fast paths.
JUDGE_FOLDER = Path(__file__).parent / "pinned_judge"
JUDGE = "pinned"


def accept_length(agreement: float) -> float:
    """Tokens a step of the token-level arms: 1 + p + .. + p^5."""
    return round(sum(agreement**i for i in range(CHAIN + 1)), 2)


def threshold_for(share: float, num_segments: int) -> float:
    """The threshold at which random verdicts keep `share` of a draft on average.

    A verdict is uniform in [0, 1), and a draft is kept up to the first that fails: the
    share is the mean of q, q^2, .. of all segments, where q passes one verdict.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        q = (low + high) / 2
        kept = sum(q**k for k in range(1, num_segments + 1)) / num_segments
        low, high = (q, high) if kept < share else (low, q)
    return 1.0 - low


@dataclass(frozen=True, eq=False)
class Arm:
    """What to measure of a server.

    env: added to its environment. pinned: the made-up shares that its speed depends on.
    fields: of each request, as custom_params.
    """

    name: str
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, float] = field(default_factory=dict)
    fields: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """What arms of one server have in common."""
        return self.flags, tuple(sorted(self.env.items()))


def paths_off_file(args: argparse.Namespace) -> Path:
    """Names the fast paths that a running server does not take (`pinned_judge/`)."""
    return args.logs / "paths-off"


def arms_of(args: argparse.Namespace) -> list[Arm]:
    """In the order in which they are worth having when time runs out."""
    spec = PAIRS[args.pair]
    alone = tuple(model_args(spec, args.models, with_draft=False))
    pair = tuple(model_args(spec, args.models))
    head = str(head_folder(spec, args.models))
    chain = (
        *("--speculative-num-steps", str(CHAIN), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(CHAIN + 1)),
    )
    num_segments = args.window // args.segment

    def parse(name: str, keep: float, *more: str) -> Arm:
        return Arm(
            name,
            (
                *pair,
                *("--speculative-algorithm", "PARSE"),
                *("--speculative-parse-client-options", "all"),
                *("--speculative-parse-judge", JUDGE),
                *("--speculative-parse-window", str(args.window)),
                *("--speculative-parse-segmenter", f"fixed:{args.segment}"),
                *("--speculative-parse-max-segments", str(num_segments)),
                # Made-up verdicts fail in each draft; what is rewritten then would be
                # measured, not what is judged.
                *("--speculative-parse-recover-segments", "0"),
                *more,
            ),
            {
                "PYTHONPATH": str(JUDGE_FOLDER),
                "PARSE_PATHS_OFF": str(paths_off_file(args).absolute()),
            },
            {"kept_fraction": keep, "accept_length": 1.0},
            {"parse_threshold": threshold_for(keep, num_segments)},
        )

    def by_sglang(name: str, algorithm: str, flags: tuple[str, ...]) -> Arm:
        return Arm(
            name,
            (*flags, "--speculative-algorithm", algorithm, *chain),
            {"SGLANG_SIMULATE_ACC_LEN": str(accept_length(AGREEMENT))},
            {"accept_length": accept_length(AGREEMENT)},
        )

    with_head = (*alone, "--speculative-draft-model-path", head)
    arms = [
        Arm("target", alone),
        parse("parse-0.9-adaptive", 0.9),
        by_sglang("sglang-eagle3", "EAGLE3", with_head),
        by_sglang("standalone", "STANDALONE", pair),
        parse("parse-0.8-adaptive", 0.8),
        parse("parse-0.7-adaptive", 0.7),
        parse("hostile", 0.0),
        parse("parse-0.9", 0.9, "--no-speculative-parse-adaptive"),
        parse("rounds", 0.9, "--log-level", "debug"),
    ]
    return [a for a in arms if args.arms is None or a.name in args.arms]


def servers_of(arms: Sequence[Arm]) -> list[list[Arm]]:
    """The arms of each server, servers in the order of their first arms."""
    servers: dict[Any, list[Arm]] = {}
    for arm in arms:
        servers.setdefault(arm.start, []).append(arm)
    return list(servers.values())
