"""What fails for one request, or in one extension, costs nobody else a token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from sglang_parse.drafting.drafter import Drafter, Prefill
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState

logger = logging.getLogger(__name__)


def guard(r: RequestRound, step: Callable[[RequestRound], None]) -> None:
    """A step for one request; what it raises ends that request and no other."""
    if r.error is not None:
        return
    try:
        step(r)
    except Exception as error:
        logger.exception("PARSE: request %.64r failed", getattr(r.req, "rid", "?"))
        r.fail(error)


class ExtensionErrors:
    """Counts what segmenters, judges and drafters of installed packages raise.

    count: told the kind and the name each time. The first error of each is logged.
    """

    def __init__(self, count: Callable[[str, str], None]) -> None:
        self.count = count
        self._told: set[tuple[str, str]] = set()

    def note(self, error: ExtensionError) -> None:
        self.count(error.kind, error.name)
        if (error.kind, error.name) in self._told:
            return
        self._told.add((error.kind, error.name))
        logger.error(
            "PARSE: %s; the target goes on without it. Its further errors are counted, "
            "not logged.",
            error,
            exc_info=error,
        )


class GuardedDrafters:
    """The drafters of a server. Where one raises, its requests go on without it.

    on_error: told the drafter's name each time. The first error is logged.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        on_error: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.drafters = drafters
        self.on_error = on_error
        self._told: set[str] = set()

    def draft(self, round: Round) -> None:
        """Each in its turn, behind what stands already."""
        for drafter in self.drafters:
            before = [(r.draft, r.is_drafting) for r in round]
            if not self._ask(drafter, lambda d: d.draft(round), states_of(round)):
                for r, kept in zip(round, before, strict=True):
                    r.draft, r.is_drafting = kept

    def after_pass(self, round: Round) -> None:
        for drafter in self.drafters:
            self._ask(drafter, lambda d: d.after_pass(round), states_of(round))

    def before_prefill(self, prefill: Prefill) -> None:
        states = [one.state for one in prefill.requests if one.state is not None]
        for drafter in self.drafters:
            self._ask(drafter, lambda d: d.before_prefill(prefill), states)

    def after_prefill(
        self, prefill: Prefill, features: Tensor | None, next_tokens: Tensor
    ) -> None:
        states = [one.state for one in prefill.requests if one.state is not None]
        for drafter in self.drafters:
            self._ask(
                drafter,
                lambda d: d.after_prefill(prefill, features, next_tokens),
                states,
            )

    def _ask(
        self,
        drafter: Drafter,
        step: Callable[[Drafter], None],
        states: Sequence[RequestState],
    ) -> bool:
        """Whether the drafter did it without an error."""
        if states and all(drafter.name in s.failed_drafters for s in states):
            return True
        try:
            step(drafter)
        except Exception:
            self._tell(drafter.name)
            for state in states:
                state.failed_drafters.add(drafter.name)
            return False
        return True

    def _tell(self, name: str) -> None:
        self.on_error(name)
        if name not in self._told:
            self._told.add(name)
            logger.exception(
                "PARSE: drafter %s failed; its requests go on without it. Its further "
                "errors are counted, not logged.",
                name,
            )


def states_of(round: Round) -> list[RequestState]:
    return [r.state for r in round]
