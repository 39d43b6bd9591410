"""Extensions that installed packages offer by entry points.

Only the packages' metadata is read at first, once per process. The module of an
extension is imported when a flag or a request first names the extension.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sglang_parse.options.validation import shown

NAME = re.compile("[a-z][a-z0-9_-]{0,39}")


class ExtensionError(Exception):
    """What an extension raised while requests are served, or did wrong there."""

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(f"the {kind} {name!r} {message}")
        self.kind = kind
        self.name = name


class Extension:
    """One name in one entry point group, and what is behind it."""

    def __init__(self, owner: Extensions, entry_point: EntryPoint) -> None:
        self.owner = owner
        self.name = name = entry_point.name
        self.entry_point = entry_point
        dist = entry_point.dist
        self.dist = f"{dist.name} {dist.version}" if dist else "an unnamed package"
        #: Why it cannot be used, in one sentence, or "".
        self.fault = ""
        self._loaded: Any = None
        self._made: Any = None
        if not NAME.fullmatch(name) or name in owner.built_in:
            self.fault = self.sentence(
                "has a name that is malformed or built in",
                "a lower case word of letters, digits, - and _, at most 40 characters "
                f"long, other than {', '.join(owner.built_in)}",
            )

    def load(self) -> Any:
        """The object that the entry point names, imported once; None with a `fault`."""
        if self._loaded is None and not self.fault:
            try:
                found = self.entry_point.load()
            except Exception as e:  # whatever the import of a module may raise
                self.fault = self.sentence(f"cannot be imported ({described(e)})")
                return None
            if self.owner.functions and not callable(found):
                what = f"is an object of type {type(found).__name__}"
                self.fault = self.sentence(what)
                return None
            self._loaded = found
        return self._loaded

    def make(self, build: Callable[[Any], Any]) -> Any:
        """What `build` makes of the object that the entry point names, made once.

        build: raises an error whose text says what the object lacks. Raises ValueError
        with the sentence that `fault` holds from then on.
        """
        if self._made is None and (found := self.load()) is not None:
            try:
                self._made = build(found)
            except Exception as e:  # the object may be a class, which `build` calls
                self.fault = self.sentence(f"cannot be used ({described(e)})")
        if self.fault:
            raise ValueError(self.fault)
        return self._made

    def sentence(self, what: str, expected: str = "") -> str:
        """One sentence about it. what: the predicate."""
        owner = self.owner
        return (
            f"the {owner.kind} {shown(self.name)} of {self.dist} (entry point group "
            f"{owner.group}) {what}; expected {expected or owner.expected}."
        )


class Extensions:
    """All extensions of one kind.

    kind: `segmenter`, `judge` or `drafter`. built_in: names that none may have.
    expected: what an entry point has to name. functions: whether it has to be callable;
    a judge may be an object.
    """

    def __init__(
        self, kind: str, built_in: Sequence[str], expected: str, functions: bool = True
    ) -> None:
        self.kind = kind
        self.group = f"sglang_parse.{kind}s"
        self.built_in = tuple(built_in)
        self.expected = expected
        self.functions = functions

    @cached_property
    def found(self) -> dict[str, Extension]:
        """Every name in the group, usable or not, in alphabetical order."""
        every = sorted(entry_points(group=self.group), key=lambda one: one.name)
        return {one.name: Extension(self, one) for one in every}

    def names(self) -> tuple[str, ...]:
        """Names of those that are not known to be broken."""
        return tuple(name for name, one in self.found.items() if not one.fault)

    def check(self, name: str, field: str) -> bool:
        """Whether a package offers the name. Raises ValueError naming `field` if its
        module cannot be imported, or offers nothing fit of that name."""
        one = self.found.get(name)
        if one is None:
            return False
        one.load()
        if one.fault:
            raise ValueError(f"{field} is {shown(name)}: {one.fault}")
        return True


def described(error: Exception) -> str:
    """An error in a parenthesis: its type and the first line of its text."""
    text = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
