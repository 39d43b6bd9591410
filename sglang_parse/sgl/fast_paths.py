"""Which fast paths a server takes, and why it does not take the others.

A fast path computes what a slower, plain one computes too. Where it raises, or the
proof at start (`sglang_parse/proof`) finds that it differs, it is switched off by its
name, and the server continues with the plain one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TARGET_STEPS = "target_steps"
SHORT_PASSES = "short_passes"
PASS_GRAPHS = "pass_graphs"
DRAFT_STEPS = "draft_steps"
HEAD_PREFILLS = "head_prefills"
HEAD_STEPS = "head_steps"
SAMPLED_ROWS = "sampled_rows"
#: Every path by its name, in the order in which they are proven: a path may be part of
#: those behind it.
PATHS = (
    TARGET_STEPS,
    *("route_mask", "route_virtual", "route_rows"),
    *(PASS_GRAPHS, SHORT_PASSES, DRAFT_STEPS, HEAD_PREFILLS, HEAD_STEPS, SAMPLED_ROWS),
)
PROVEN, UNPROVEN, OFF, ABSENT = "proven", "unproven", "off", "absent"


class PassFailed(RuntimeError):
    """No route can run a verify pass of the target here."""


@dataclass
class PathState:
    """state: `proven`, `unproven`, `off`, or `absent` where the server has none. why:
    of `off`, `absent` and `unproven`. difference: from the plain path, as a share of
    the spread of the logits; None where none was measured."""

    state: str = UNPROVEN
    why: str = ""
    difference: float | None = None


class FastPaths:
    """The fast paths of one server process."""

    def __init__(self) -> None:
        self.states: dict[str, PathState] = {}
        #: Whether a path that raises is to be seen (`sglang_parse/proof`).
        self.is_proving = False
        #: Told the name and whether it is on, whenever that is set.
        self.on_change: Callable[[str, bool], None] = lambda name, is_on: None

    def is_on(self, name: str) -> bool:
        """Whether the path may be taken. One that is not proven may."""
        found = self.states.get(name)
        return found is None or found.state != OFF

    def set(
        self, name: str, state: str, why: str = "", difference: float | None = None
    ) -> None:
        self.states[name] = PathState(state, why, difference)
        self.on_change(name, state in (PROVEN, UNPROVEN))

    def break_off(self, name: str, error: Exception, instead: str) -> None:
        """Switch off what has raised while the server serves; one traceback."""
        if self.is_on(name):
            self.set(name, OFF, f"it raised {told(error)}")
            logger.error(
                "PARSE: %s is off until the server restarts, because it raised %s; %s.",
                *(name, told(error), instead),
                exc_info=error,
            )

    def run(
        self, name: str, fast: Callable[[], Result], plain: Callable[[], Result]
    ) -> Result:
        """The fast path's result, or the plain one's where the fast path is off.

        A path that raises is switched off, unless the plain one raises too: the error
        is then not its own.
        """
        found = self.states.get(name)
        if found is not None and found.state in (OFF, ABSENT):
            return plain()
        if self.is_proving:
            return fast()
        try:
            return fast()
        except Exception as error:
            result = plain()
            self.break_off(name, error, "the plain path takes its place")
            return result

    def sync(self, ranks: Any) -> None:
        """Switch off what is off on another rank. A collective.

        ranks: `sgl.ranks.Ranks`.
        """
        agreed = ranks.agree_on_least([int(self.is_on(name)) for name in PATHS])
        for name, is_on in zip(PATHS, agreed, strict=True):
            if not is_on and self.is_on(name):
                self.set(name, OFF, "it is off on another rank")

    def as_dict(self) -> dict[str, Any]:
        """What /server_info shows."""
        return {n: asdict(self.states[n]) for n in PATHS if n in self.states}


def told(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def route_path(route: str) -> str:
    """The name of a verify route as a path."""
    return f"route_{route}"
