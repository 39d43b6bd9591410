"""What the engine needs of a target model.

SGLang stands behind these in a server, fakes in the engine's tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sglang_parse.drafting.drafter import Prefill
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

    def prefill(self, batch: Any, *, needed: bool) -> tuple[Any, Tensor | None]:
        """SGLang's own prefill: its result, and features where drafters read them."""


class TextJudge(Protocol):
    """What judges clients' texts (`client_texts.client_pass.ClientPass`)."""

    def begin(self, prefill: Prefill) -> list[tuple[int, int]]:
        """(place in the batch, first token) of each request of a prefill whose text
        becomes output."""
