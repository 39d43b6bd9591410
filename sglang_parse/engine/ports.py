"""What the engine needs of the world: a target, KV slots, and the other ranks.

SGLang stands behind these in a server, fakes in the engine's tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sglang_parse.requests.round_records import Round
from sglang_parse.verify.layout import VerifyPlan


class Sampler(Protocol):
    """The target's own tokens at rows of its pass."""

    def sample(
        self, round: Round, owner: Sequence[int], offset: Sequence[int]
    ) -> tuple[list[int], Any]:
        """The target's own token behind `offset[k]` draft tokens of request `owner[k]`
        of the round, and the logprobs of these tokens."""

    def join_samples(self, samples: Sequence[Any]) -> Any:
        """The logprobs of several calls of `sample`, their rows one after the other."""


class Target(Sampler, Protocol):
    """The target model (`verify.model.TargetModel`)."""

    def verify(self, round: Round, plan: VerifyPlan) -> Any:
        """One pass over the plan's rows; a `verify.output.PassOutput`."""

    def decode(
        self, round: Round, go_on: Callable[[list[list[int]], int], bool]
    ) -> list[list[int]]:
        """At most `num_steps` ordinary decode steps, a row per request: the tokens of
        each step. Fills `output`, of the last step, and `sampled` of the round.

        go_on: asked before each step but the first, with the tokens of the steps that
        are known and the number of all.
        """

    def keep(self, round: Round) -> None:
        """Behind a pass: leave the target at what each request has decided."""

    def prefill(self, batch: Any, *, needed: bool) -> tuple[Any, Tensor | None]:
        """SGLang's own prefill: its result, and features where drafters read them."""


class Slots(Protocol):
    """KV slots of a round (`sgl.slots.RoundSlots`)."""

    @property
    def max_rows(self) -> int:
        """Rows of the longest pass."""

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool."""

    @property
    def page_size(self) -> int:
        """Slots that are taken together."""

    def num_free(self, tree_cache: Any, num_rows: int = 0) -> int:
        """Slots that can be had now, cached prefixes evicted, where so many rows are to
        grow by whole pages."""

    def extend_rows(self, batch: Any, lens: Sequence[int]) -> None:
        """Give each request slots for its first lens[i] columns."""

    def trim_rows(self, batch: Any, lens: Sequence[int]) -> None:
        """Free the slots behind the first lens[i] columns."""


class RankAgreement(Protocol):
    """What tensor-parallel ranks agree on (`sgl.ranks.Ranks`)."""

    def agree(self, value: int) -> int:
        """The first rank's value."""

    def agree_all(self, lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """The first rank's values, in lists of the same lengths on all ranks."""
