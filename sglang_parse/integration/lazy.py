"""Functions that are imported when they are first called."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class LazyFunction:
    """A stand-in for a function of ours."""

    #: "module:function".
    target: str

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function, whose module is imported at the first look."""
        found: Callable[..., Any] = pkgutil.resolve_name(self.target)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def lazy(target: str) -> LazyFunction:
    """The function `target`, "module:function", imported when it is first called.

    SGLang applies hooks in every one of its processes. Most call few of them, and each
    imports only what it calls.
    """
    return LazyFunction(target)
