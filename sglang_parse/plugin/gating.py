"""What a hook is, and how it is skipped on servers that do not serve PARSE."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_parse.sgl.names import is_parse

BEFORE, AFTER = HookType.BEFORE, HookType.AFTER
AROUND, REPLACE = HookType.AROUND, HookType.REPLACE


def serves_parse() -> bool:
    """Whether the server of this process runs with --speculative-algorithm PARSE.

    False in a process for which SGLang has not published a configuration (yet).
    """
    from sglang.srt.runtime_context import get_context, get_spec

    if not get_context().is_config_namespace_published("spec"):
        return False
    return is_parse(get_spec().speculative_algorithm)


@dataclass(frozen=True)
class Hook:
    """One hook on a function of SGLang."""

    #: Whether ours runs before, after, around or instead of SGLang's. None: before a
    #: step of SGLang's resolution of arguments, which has a registry of its own.
    kind: HookType | None
    #: Dotted name of the function, or the name of the step.
    target: str
    #: Ours as "module:function". It is imported when it is first called, because every
    #: process of SGLang has all hooks and calls few of them.
    ours: str
    #: Completes "PARSE needs it so that ...".
    purpose: str
    #: The change of SGLang that makes it superfluous.
    until: str
    #: Whether it is skipped where PARSE is not served.
    is_gated: bool = True
    #: Further pairs of target and ours, for the same reason.
    others: tuple[tuple[str, str], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs of target and ours."""
        return ((self.target, self.ours), *self.others)

    def register(self) -> None:
        """Hand it to SGLang; `load_plugins` applies it."""
        for target, ours in self.pairs:
            function = lazy(ours)
            if self.kind is None:
                register_step(target, function)
                continue
            if self.is_gated:
                function = gate(function, self.kind)
            HookRegistry.register(target, function, self.kind)

    @property
    def missing(self) -> str:
        """A target that SGLang did not apply it to, or ""."""
        if self.kind is None:
            return ""
        applied = HookRegistry._patched
        return next((t for t, _ in self.pairs if t not in applied), "")


def lazy(target: str) -> Callable[..., Any]:
    """The function "module:function", imported when it is first called."""
    found = functools.cache(lambda: pkgutil.resolve_name(target))

    def call(*args: Any, **kwargs: Any) -> Any:
        return found()(*args, **kwargs)

    return call


def gate(function: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    """`function`, skipped where PARSE is not served. SGLang takes the None of a BEFORE
    or AFTER hook for "unchanged"."""

    def gated(*args: Any, **kwargs: Any) -> Any:
        if serves_parse():
            return function(*args, **kwargs)
        if kind is AROUND:
            original, *rest = args
            return original(*rest, **kwargs)
        return None

    return gated


def register_step(name: str, function: Callable[[Any], None]) -> None:
    """Run `function` before a step of SGLang's resolution, on PARSE's arguments."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook(name)
    def step(server_args: Any, previous: Callable[[Any], None]) -> None:
        if is_parse(resolving_view(server_args).speculative_algorithm):
            function(server_args)
        previous(server_args)
