"""The probe: verdicts from the target's hidden states, without rows of their own.

A probe is a linear classifier. It is trained on the verdicts of a judge's question, and
answers that question from the hidden state of the last token of a prefix
(arXiv:2504.05419 finds such probes accurate on reasoning models). It may be wrong where
the question is right, and it is bound to all that it was trained for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import torch
from msgspec import Meta

if TYPE_CHECKING:
    from torch import Tensor

#: Depths of the target at which a probe reads hidden states, besides the last.
DEPTHS = (1 / 4, 1 / 2, 3 / 4)


class ProbeError(ValueError):
    """A probe that cannot be used: the end of a sentence that names its file."""


@dataclass(frozen=True)
class TargetHashes:
    """What identifies a model: hashes of its configuration and of its weights."""

    config: str
    weights: str


@dataclass(frozen=True)
class Learnt:
    """What a probe was trained for; it is used for nothing else.

    threshold: the question's score from which on a prefix counted as valid. suffix:
    token ids of the question after a prefix.
    """

    target: TargetHashes
    question: str
    suffix: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    threshold: float


@dataclass(frozen=True, eq=False)
class Probe:
    """A classifier and what it is bound to.

    layers: the hidden state in front of each of these layers is read, rising, and the
    one in front of the LM head. cutoffs: by segmenter, the score from which on a prefix
    is valid. weight: [n] float32. bias: [].
    """

    learnt: Learnt
    layers: tuple[int, ...]
    hidden_size: int
    cutoffs: Mapping[str, float]
    weight: Tensor
    bias: Tensor
    #: What was measured when it was trained.
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        width = (len(self.layers) + 1) * self.hidden_size
        if self.weight.shape != (width,) or self.bias.shape != ():
            shapes = tuple(self.weight.shape), tuple(self.bias.shape)
            raise ProbeError(
                f"has a weight and a bias of the shapes {shapes[0]} and {shapes[1]}; "
                f"expected ({width},) and ()"
            )

    def logits(self, states: Tensor) -> Tensor:
        """states: [n, width] of any dtype. Returns [n] float32."""
        weight, bias = (t.to(states.device) for t in (self.weight, self.bias))
        logits: Tensor = states.float() @ weight + bias
        return logits

    def scores(self, states: Tensor) -> Tensor:
        """Probability that the question would find each prefix valid: [n] float32."""
        return torch.sigmoid(self.logits(states))

    def misfit(
        self,
        *,
        target: TargetHashes | None = None,
        question: str | None = None,
        threshold: float | None = None,
        segmenter: str | None = None,
    ) -> str:
        """Why it is not for what is given, as the end of "PROBE ...", or ""."""
        learnt = self.learnt
        if target is not None and target != learnt.target:
            same = target.config == learnt.target.config
            part = "weights" if same else "configuration"
            return f"was learnt for another target (its {part} has another fingerprint)"
        if question is not None and question != learnt.question:
            return f"was learnt for the question {learnt.question!r}"
        if threshold is not None and threshold != learnt.threshold:
            return f"was learnt for the threshold {learnt.threshold:g}"
        if segmenter is not None and segmenter not in self.cutoffs:
            names = " or ".join(map(repr, self.cutoffs))
            return f"was learnt for the segmenter {names}"
        return ""


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that are read by default."""
    last = num_layers - 1
    return tuple(sorted({min(last, max(1, round(p * num_layers))) for p in DEPTHS}))
