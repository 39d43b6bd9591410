"""Drafters of installed packages: made at start-up, and checked as they write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_parse.drafting.drafter import (
    Drafter,
    DrafterContext,
    DrafterResources,
    Prefill,
    extend_draft,
)
from sglang_parse.options.extensions import (
    Extension,
    ExtensionError,
    Extensions,
    described,
)
from sglang_parse.options.validation import DRAFTER_NAMES
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import RequestRound, Round

logger = logging.getLogger(__name__)

DRAFTER_EXTENSIONS = Extensions(
    "drafter",
    built_in=DRAFTER_NAMES,
    expected="a function that takes a DrafterContext and returns a Drafter or None",
)
ATTRIBUTES = (
    *("name", "token_level", "max_tokens", "reads_features", "runners"),
    *("open", "can_draft", "before_prefill", "after_prefill", "draft", "after_pass"),
)


class ExtensionDrafter(Drafter):
    """A drafter of an installed package, or of an optional room of ours.

    Its draft is cut where the response ends or a grammar refuses it. One that breaks
    the rules raises, as the drafter itself may: the engine continues without it.

    on_error: told what the drafter raises where the engine does not look.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        on_error: Callable[[ExtensionError], None],
    ) -> None:
        self.name = drafter.name
        self.token_level = drafter.token_level
        self.max_tokens = drafter.max_tokens
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._on_error = on_error
        self._is_open = False

    def open(self, resources: DrafterResources) -> None:
        try:
            self._drafter.open(resources)
            self._is_open = True
        except Exception as e:
            self._note(e, "could not be opened and drafts nothing")

    def can_draft(self, r: RequestRound) -> bool:
        state = r.state
        if not self._is_open or self.name in state.failed_drafters:
            return False
        if self.token_level and not state.options.compose:
            return False
        try:
            return bool(self._drafter.can_draft(r))
        except Exception as e:
            state.failed_drafters.add(self.name)
            self._note(e, "failed")
            return False

    def before_prefill(self, prefill: Prefill) -> None:
        if self._is_open:
            self._drafter.before_prefill(prefill)

    def after_prefill(
        self, prefill: Prefill, features: Tensor | None, next_tokens: Tensor
    ) -> None:
        if self._is_open:
            self._drafter.after_prefill(prefill, None, next_tokens)

    def draft(self, round: Round) -> None:
        before = [(r.draft, r.room(self.name)) for r in round]
        if not any(room for _, room in before):
            return
        self._drafter.draft(round)
        written = [
            self._written(r, draft, room)
            for r, (draft, room) in zip(round, before, strict=True)
        ]
        for r, (draft, _), (tokens, ended) in zip(round, before, written, strict=True):
            r.draft = draft
            extend_draft(r, self, tokens, ended=ended)

    def after_pass(self, round: Round) -> None:
        if self._is_open:
            self._drafter.after_pass(round)

    def _written(
        self, r: RequestRound, before: Draft, room: int
    ) -> tuple[tuple[int, ...], bool]:
        """The new tokens of a request, and whether the response ends with them. Raises
        ValueError where the drafter did what it may not."""
        num_before = len(before.tokens)
        tokens = tuple(r.draft.tokens[num_before:])
        if r.draft.tokens[:num_before] != before.tokens:
            raise ValueError(f"drafter {self.name} changed what stood in the draft")
        if len(tokens) > room:
            raise ValueError(
                f"drafter {self.name} wrote {len(tokens)} tokens; expected at most "
                f"{room} (RequestRound.room)"
            )
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"drafter {self.name} wrote {token!r}; expected token ids below "
                    f"{self._vocab_size}"
                )
        return tokens, r.draft.ended and not before.ended

    def _note(self, error: Exception, what: str) -> None:
        told = ExtensionError("drafter", self.name, what)
        told.__cause__ = error
        self._on_error(told)


def create_extension_drafters(
    context: DrafterContext, on_error: Callable[[ExtensionError], None]
) -> list[ExtensionDrafter]:
    """Drafters of installed packages that want to serve, by name. One that is broken is
    left out with a warning, since no flag asks for it."""
    made = []
    for one in DRAFTER_EXTENSIONS.found.values():
        try:
            drafter = create_drafter(one, context)
        except ValueError as e:
            logger.warning("PARSE goes on without a drafter: %s", e)
            continue
        if drafter is not None:
            made.append(ExtensionDrafter(drafter, context.vocab_size, on_error))
    return made


def create_drafter(one: Extension, context: DrafterContext) -> Drafter | None:
    """None where it does not want to serve. Raises ValueError naming the package."""
    create: Callable[[DrafterContext], Drafter | None] = one.make(lambda found: found)
    try:
        drafter: Drafter | None = create(context)
        if drafter is not None:
            check_drafter(one.name, drafter)
    except Exception as e:
        raise ValueError(one.sentence(f"cannot be used ({described(e)})")) from e
    return drafter


def check_drafter(name: str, drafter: Any) -> None:
    """Raises TypeError on what it lacks, ValueError on what it has and cannot have."""
    for attribute in ATTRIBUTES:
        if not hasattr(drafter, attribute):
            raise TypeError(f"its drafter has no {attribute}; subclass Drafter")
    if drafter.name != name:
        raise ValueError(f"its drafter's name is {drafter.name!r}")
    if not isinstance(drafter.token_level, bool):
        raise TypeError(f"its token_level is {drafter.token_level!r}, no bool")
    if not isinstance(drafter.max_tokens, int) or drafter.max_tokens < 0:
        raise ValueError(f"its max_tokens is {drafter.max_tokens!r}")
    if drafter.token_level and not drafter.max_tokens:
        raise ValueError("its max_tokens is 0 and token_level is true")
    if drafter.reads_features or drafter.runners:
        raise ValueError("it has runners or reads_features, which no package may have")
