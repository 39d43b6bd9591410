"""Which fast paths a server takes, and why it does not take the others.

A fast path computes what a slower, plain one computes too. Where it raises, or the
proof at start (`sglang_parse/proof`) finds that it differs, it is switched off by its
name, and the server continues with the plain one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TARGET_STEPS = "target_steps"
SHORT_PASSES = "short_passes"
PASS_GRAPHS = "pass_graphs"
DRAFT_STEPS = "draft_steps"
GUESSED_ROWS = "guessed_rows"
HEAD_PREFILLS = "head_prefills"
HEAD_STEPS = "head_steps"
SAMPLED_ROWS = "sampled_rows"
#: Every path by its name, in the order in which they are proven: a path may be part of
#: those behind it.
PATHS = (
    TARGET_STEPS,
    *("route_mask", "route_virtual", "route_rows"),
    *(PASS_GRAPHS, SHORT_PASSES, DRAFT_STEPS, GUESSED_ROWS),
    *(HEAD_PREFILLS, HEAD_STEPS, SAMPLED_ROWS),
)
PROVEN, UNPROVEN, OFF, ABSENT = "proven", "unproven", "off", "absent"
# Quanta in which a path is left out after memory ran out in it.
LEFT_OUT = 64


class PassFailed(RuntimeError):
    """No route can run a verify pass of the target here."""


class PassLacksMemory(PassFailed):
    """Memory ran out in this verify pass; a later one may run."""


class RanksDiffer(RuntimeError):
    """A path has raised on some tensor-parallel ranks alone."""


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
        #: Quanta for which a path is still left out, because memory ran out in it.
        self.left_out: Counter[str] = Counter()
        #: How often each path has raised.
        self._errors: Counter[str] = Counter()
        #: Told the name and whether it is on, whenever that is set.
        self.on_change: Callable[[str, bool], None] = lambda name, is_on: None

    def is_on(self, name: str) -> bool:
        """Whether the path may be taken now. One that is not proven may."""
        return not (self.is_off(name) or self.left_out[name])

    def is_off(self, name: str) -> bool:
        """Whether the path is off until the server restarts."""
        found = self.states.get(name)
        return found is not None and found.state == OFF

    def set(
        self, name: str, state: str, why: str = "", difference: float | None = None
    ) -> None:
        self.states[name] = PathState(state, why, difference)
        self.on_change(name, state in (PROVEN, UNPROVEN))

    def break_off(self, name: str, error: Exception, instead: str) -> None:
        """Switch off what has raised while the server serves; one traceback. Where
        memory ran out, the path is left out for some quanta, and then tried again."""
        self._errors[name] += 1
        is_on = self.is_on(name)
        if is_out_of_memory(error):
            self.left_out[name] = LEFT_OUT
            if is_on:
                logger.warning(
                    "PARSE: %s is left out for %d quanta, because memory ran out in it "
                    "(%s); %s.",
                    *(name, LEFT_OUT, told(error), instead),
                )
        elif is_on:
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
        if not self.is_on(name) or (found is not None and found.state == ABSENT):
            return plain()
        if self.is_proving:
            return fast()
        try:
            return fast()
        except Exception as error:
            failed = error
        if is_out_of_memory(failed):
            failed.__traceback__ = None  # its frames hold tensors
        result = plain()
        self.break_off(name, failed, "the plain path takes its place")
        return result

    def sync(self, ranks: Any) -> None:
        """Begin a quantum. A collective.

        An error that all ranks had has left them in step. After one of some ranks alone
        their collectives may no longer match, and tokens may be wrong: all of them then
        raise RanksDiffer. ranks: `sgl.ranks.Ranks`.
        """
        counts = [self._errors[name] for name in PATHS]
        agreed = ranks.agree_on_least([*counts, *(-n for n in counts)])
        for i, name in enumerate(PATHS):
            if agreed[i] != -agreed[i + len(PATHS)]:
                raise RanksDiffer(
                    f"{name} raised on some tensor-parallel ranks and not on others, "
                    "so they are no longer in step, and the server ends; the log of "
                    "the ranks that raised says why"
                )
        self.left_out -= Counter(list(self.left_out))  # keeps what is above zero

    def as_dict(self) -> dict[str, Any]:
        """What /server_info shows."""
        return {n: asdict(self.states[n]) for n in PATHS if n in self.states}


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host, which torch tells by its text alone."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def told(error: BaseException) -> str:
    """An error on one line."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def route_path(route: str) -> str:
    """The name of a verify route as a path."""
    return f"route_{route}"
