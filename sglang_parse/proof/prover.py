"""Proves the fast paths of a server before it serves.

A path that raises, or whose logits differ from the plain path's by more than the noise
of the device, is switched off on all ranks.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from sglang_parse.proof.path_checks import NotTaken, PathCheck, open_checks
from sglang_parse.proof.plain_path import ReferenceFailed
from sglang_parse.proof.proof_record import ProofRecord, fingerprint
from sglang_parse.sgl.fast_paths import (
    ABSENT,
    OFF,
    PATHS,
    PROVEN,
    UNPROVEN,
    FastPaths,
    told,
)

logger = logging.getLogger(__name__)

# What a rank found; of all ranks the least counts.
FOUND = (OFF, UNPROVEN, PROVEN)


def prove(parts: Any, engine: Any) -> None:
    """Prove the paths of a server whose graphs are captured; log one line for each that
    is switched off, and one for all.

    parts: `plugin.assembly.Parts`. engine: its RoundEngine.
    """
    started = time.perf_counter()
    runners = [parts.verifier.runner, *(r.runner for r in parts.draft_runners)]
    name = fingerprint(parts.server_args, parts.config, runners)
    on_card = str(runners[0].device).startswith("cuda")
    record = ProofRecord(name, writes=parts.ranks.is_first, marks=on_card)
    paths, level = parts.verifier.paths, parts.config.prove
    with torch.random.fork_rng([runners[0].gpu_id] if on_card else []):
        prover = Prover(paths, parts.ranks, record, level)
        for check in open_checks(parts, engine, is_full=level == "full"):
            prover.settle(check)
    if not parts.verifier.can_pass:
        engine.stop_drafting()
        logger.warning(
            "PARSE: no verify route works here, so the target answers alone, and "
            "parse_verify is refused."
        )
    if parts.verifier.steps_alone:
        # A longer pass would be a step without a graph.
        most = engine.target.short_passes.most_rows or engine.slots.max_rows
        engine.slots.max_rows = min(engine.slots.max_rows, most)
    seconds = time.perf_counter() - started
    logger.info("PARSE: fast paths after %.2f s: %s.", seconds, summary(paths))


def summary(paths: FastPaths) -> str:
    """All states on one line."""
    parts = []
    for state in (PROVEN, UNPROVEN, OFF, ABSENT):
        found = [
            f"{name} ({one.why})" if one.why else name
            for name, one in paths.states.items()
            if one.state == state
        ]
        parts += [f"{state} {', '.join(found)}"] if found else []
    return "; ".join(parts)


class Prover:
    """Settles what each path's state is, the same on all ranks."""

    def __init__(
        self, paths: FastPaths, ranks: Any, record: ProofRecord, level: str
    ) -> None:
        self.paths, self.ranks, self.record, self.level = paths, ranks, record, level
        # The first rank's file counts; others may have none.
        proven = [int(record.is_proven(name)) for name in PATHS]
        died = [int(record.has_died(name)) for name in PATHS]
        self.proven, self.died = ranks.agree_all([proven, died])

    def settle(self, check: PathCheck) -> None:
        name, place = check.name, PATHS.index(check.name)
        if why := check.absent():
            self.paths.set(name, ABSENT, why)
        elif self.died[place]:
            why = f"the server ended while it tried this; {self.record.path} says so"
            self._switch_off(name, why)
        elif self.level == "off":
            self.paths.set(name, UNPROVEN, "the proof is off")
        elif self.proven[place] and self.level == "fast":
            self.paths.set(name, PROVEN, "at an earlier start")
        else:
            self._try(check)

    def _try(self, check: PathCheck) -> None:
        name = check.name
        with self.record.trying(name):
            state, why, difference = self._measure(check)
            agreed = FOUND[self.ranks.agree_on_least([FOUND.index(state)])[0]]
        if agreed == OFF:
            self._switch_off(name, why or "it is off on another rank", difference)
            return
        if agreed == PROVEN:
            self.record.set(name, PROVEN)
        self.paths.set(name, agreed, why, difference)

    def _measure(self, check: PathCheck) -> tuple[str, str, float | None]:
        """State, reason and difference as this rank finds them."""
        self.paths.is_proving = True
        try:
            difference, allowed = check.measure()
        except (ReferenceFailed, NotTaken) as error:
            return OFF if check.must else UNPROVEN, str(error), None
        except Exception as error:
            logger.debug("PARSE: %s raised", check.name, exc_info=True)
            return OFF, f"it raised {told(error)}", None
        finally:
            self.paths.is_proving = False
        if difference <= allowed:
            return PROVEN, "", difference
        why = f"its logits differ from the plain path's by {difference:.2g} of their "
        return OFF, f"{why}spread (allowed {allowed:.2g})", difference

    def _switch_off(self, name: str, why: str, difference: float | None = None) -> None:
        self.paths.set(name, OFF, why, difference)
        logger.warning("PARSE: %s is off: %s.", name, why)
