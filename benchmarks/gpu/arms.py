"""What is measured of whole servers.

Arms: `target` (stock SGLang), `standalone` and `sglang-eagle3` (SGLang's own
speculative decoding with the same draft or head), `parse-F` (PARSE whose verdicts keep
the share F of every draft), `eagle3` (the head alone, by the plugin), `parse-F-eagle3`.
`exact` is the draft model in exact mode, `hostile` a draft of which nothing is kept and
nothing agrees. `rounds` is PARSE with the times of its rounds in its log, which
`benchmarks.simulate.measure` reads. Arms with the same flags share a server.
Wherever the target is followed token by token, ours or SGLang's, the accepted length is
pinned to the same value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.pairs import PAIRS, head_folder, model_args
from sglang_parse.engine.simulated import ACCEPT_ENV, KEEP_ENV

# Drafts a step of the token-level arms, the agreement a token that arms have as a rule,
# and those that the adaptive arm and the head are measured with too.
CHAIN = 5
AGREEMENT = 0.8
SWEEP = (0.7, 0.9, 0.95)
READ_FROM_FILES = (KEEP_ENV, ACCEPT_ENV)


def accept_length(agreement: float) -> float:
    """Tokens a step of the token-level arms: 1 + p + .. + p^5."""
    return round(sum(agreement**i for i in range(CHAIN + 1)), 2)


@dataclass(frozen=True, eq=False)
class Arm:
    """What to measure of a server. env: in its environment; what PARSE pins may change
    while it runs. pinned: what of its speed is not its own doing. fields: of each
    request, as custom_params."""

    name: str
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, float] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def start(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """What arms of one server have in common: flags, and the environment but for
        the values that are read from files."""
        fixed = {k: "" if k in READ_FROM_FILES else v for k, v in self.env.items()}
        return self.flags, tuple(sorted(fixed.items()))


def arms_of(args: argparse.Namespace) -> list[Arm]:
    """In the order in which they are worth having when time runs out."""
    spec = PAIRS[args.pair]
    alone = tuple(model_args(spec, args.models, with_draft=False))
    pair = tuple(model_args(spec, args.models))
    head = str(head_folder(spec, args.models))
    composed = (
        *("--speculative-parse-compose", "eagle3"),
        *("--speculative-parse-eagle-model-path", head),
        *("--speculative-parse-eagle-steps", str(CHAIN)),
    )
    chain = (
        *("--speculative-num-steps", str(CHAIN), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(CHAIN + 1)),
    )
    fixed = ("--no-speculative-parse-adaptive",)

    def parse(
        name: str, keep: float, *more: str, agreement: float = AGREEMENT, **fields: str
    ) -> Arm:
        accept = accept_length(agreement)
        return Arm(
            name,
            (
                *pair,
                *("--speculative-algorithm", "PARSE"),
                *("--speculative-parse-window", str(args.window)),
                *("--speculative-parse-segmenter", f"fixed:{args.segment}"),
                *("--speculative-parse-max-segments", str(args.window // args.segment)),
                *("--speculative-parse-verify-route", args.route),
                # Made-up verdicts fail in each draft; what is rewritten then would be
                # measured, not what is judged.
                *("--speculative-parse-recover-segments", "0"),
                *more,
            ),
            {KEEP_ENV: str(keep), ACCEPT_ENV: str(accept)},
            {"kept_fraction": keep, "accept_length": accept},
            fields,
        )

    def by_sglang(name: str, algorithm: str, flags: tuple[str, ...]) -> Arm:
        return Arm(
            name,
            (*flags, "--speculative-algorithm", algorithm, *chain),
            {"SGLANG_SIMULATE_ACC_LEN": str(accept_length(AGREEMENT))},
            {"accept_length": accept_length(AGREEMENT)},
        )

    def eagle3(name: str, agreement: float, *more: str) -> Arm:
        accept = accept_length(agreement)
        return Arm(
            name,
            (*alone, "--speculative-algorithm", "PARSE", *composed, *more),
            {ACCEPT_ENV: str(accept)},
            {"accept_length": accept},
        )

    with_head = (*alone, "--speculative-draft-model-path", head)
    arms = [
        Arm("target", alone),
        parse("parse-0.9-adaptive", 0.9),
        by_sglang("sglang-eagle3", "EAGLE3", with_head),
        eagle3("eagle3", AGREEMENT),
        parse("parse-0.9-eagle3", 0.9, *composed),
        by_sglang("standalone", "STANDALONE", pair),
        parse("exact", 0.9, parse_mode="exact"),
        parse("parse-0.8-adaptive", 0.8),
        parse("parse-0.7-adaptive", 0.7),
        parse("hostile", 0.0, agreement=0.0),
        parse("parse-0.9", 0.9, *fixed),
        parse("rounds", 0.9, "--log-level", "debug"),
    ]
    for a in SWEEP:
        arms.append(parse(f"parse-0.9-adaptive-agree-{a}", 0.9, agreement=a))
        arms.append(eagle3(f"eagle3-agree-{a}", a, *fixed))
    return [a for a in arms if args.arms is None or a.name in args.arms]


def servers_of(arms: Sequence[Arm]) -> list[list[Arm]]:
    """The arms of each server, servers in the order of their first arms."""
    servers: dict[Any, list[Arm]] = {}
    for arm in arms:
        servers.setdefault(arm.start, []).append(arm)
    return list(servers.values())
