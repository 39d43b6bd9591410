"""Probes: verdicts read from the target's hidden states, without rows of their own.

A probe is a small classifier. It is learnt from the verdicts of a judge's question, and
it answers that question from the hidden state of the last token of a prefix
(arXiv:2504.05419 finds such probes accurate on reasoning models). It may be wrong where
the question is right. Its file is bound to all that it was learnt for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "sglang_parse.probe/1"
MAX_BYTES = 1 << 20
#: Parts of the target's depth whose hidden states a probe reads, besides the last.
DEPTHS = (1 / 4, 1 / 2, 3 / 4)
_KEY = "probe"


class ProbeError(ValueError):
    """A probe's file that cannot be used: the end of a sentence that names it."""


@dataclass(frozen=True)
class Target:
    """What identifies a model: hashes of its configuration and of its weights."""

    config: str
    weights: str


@dataclass(frozen=True)
class Learnt:
    """What a probe was learnt for; it is used for nothing else.

    threshold: of the question's score, from which on a prefix counted as valid.
    suffix: token ids of the question behind a prefix.
    """

    target: Target
    question: str
    suffix: tuple[int, ...]
    threshold: float


@dataclass(frozen=True)
class Point:
    """How scores are used under one segmenter.

    cutoff: a prefix is valid from this score on. low, high: between them the score is
    in doubt; low <= cutoff <= high.
    """

    cutoff: float = 0.5
    low: float = 0.5
    high: float = 0.5

    def is_sure(self, score: float) -> bool:
        """Whether the score decides by itself."""
        return not self.low < score < self.high

    def adjusted(self, cutoff: float | None, band: float | None) -> Point:
        """With another cutoff, and another share of the scores on either side of it in
        doubt; None for those that were learnt."""
        c = self.cutoff if cutoff is None else cutoff
        if band is None:
            return Point(c, min(self.low, c), max(self.high, c))
        return Point(c, c * (1 - band), c + (1 - c) * band)


@dataclass(frozen=True, eq=False)
class Probe:
    """A classifier and what it is bound to.

    layers: the hidden state in front of each of these layers is read, rising, and
    behind them the one in front of the LM head. weight: [n] float32, bias: []. inner:
    [n, width] and [n] of a hidden layer, None for a linear probe.
    """

    learnt: Learnt
    layers: tuple[int, ...]
    hidden_size: int
    points: Mapping[str, Point]
    weight: Tensor
    bias: Tensor
    inner: tuple[Tensor, Tensor] | None = None
    #: What was measured when it was learnt.
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        width = self.width
        if self.inner is not None:
            rows, shift = self.inner
            if (
                rows.ndim != 2
                or rows.shape[1] != width
                or shift.shape != rows.shape[:1]
            ):
                raise ProbeError("has a hidden layer of another width")
            width = len(rows)
        if self.weight.shape != (width,) or self.bias.shape != ():
            raise ProbeError("has weights of another width than its layers")

    @property
    def width(self) -> int:
        """Columns of the states that it reads."""
        return (len(self.layers) + 1) * self.hidden_size

    def logits(self, states: Tensor) -> Tensor:
        """states: [n, width] of any dtype. Returns [n] float32."""
        x = states.float()
        if self.inner is not None:
            weight, bias = (t.to(x.device) for t in self.inner)
            x = torch.relu(x @ weight.T + bias)
        logits: Tensor = x @ self.weight.to(x.device) + self.bias.to(x.device)
        return logits

    def scores(self, states: Tensor) -> Tensor:
        """Chance that the question would find each prefix valid: [n] float32."""
        return torch.sigmoid(self.logits(states))


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that are read where nothing else is said."""
    last = num_layers - 1
    return tuple(sorted({min(last, max(1, round(p * num_layers))) for p in DEPTHS}))


def save_probe(probe: Probe, path: Path) -> None:
    """Write a safetensors file. Raises ProbeError where it would exceed MAX_BYTES."""
    from safetensors.torch import save

    tensors = {"weight": probe.weight.float(), "bias": probe.bias.float()}
    if probe.inner is not None:
        tensors |= dict(zip(("inner.weight", "inner.bias"), probe.inner, strict=True))
    about = {
        "format": FORMAT,
        "learnt": asdict(probe.learnt),
        "layers": list(probe.layers),
        "hidden_size": probe.hidden_size,
        "points": {name: asdict(point) for name, point in probe.points.items()},
        "figures": dict(probe.figures),
    }
    whole = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    data = save(whole, metadata={_KEY: json.dumps(about, sort_keys=True)})
    if len(data) > MAX_BYTES:
        raise ProbeError(f"would have {len(data)} bytes; expected at most {MAX_BYTES}")
    path.write_bytes(data)


def load_probe(path: str | Path) -> Probe:
    """Read a file of `save_probe`. Raises ProbeError on anything else."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise ProbeError(f"has {size} bytes; expected at most {MAX_BYTES}")
        with safe_open(file, framework="pt") as found:
            about = json.loads((found.metadata() or {})[_KEY])
            tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    except OSError as e:
        raise ProbeError(f"cannot be read ({e.strerror or e})") from e
    except (SafetensorError, KeyError, ValueError) as e:
        if isinstance(e, ProbeError):
            raise
        raise ProbeError("is no probe of `sglang-parse probe train`") from e
    try:
        return _probe_of(about, tensors)
    except (KeyError, TypeError, AttributeError) as e:
        raise ProbeError("is no probe of `sglang-parse probe train`") from e


def _probe_of(about: dict[str, Any], tensors: dict[str, Tensor]) -> Probe:
    if about["format"] != FORMAT:
        raise ProbeError(f"has the format {about['format']!r}; expected {FORMAT!r}")
    learnt = about["learnt"]
    inner = None
    if "inner.weight" in tensors:
        inner = tensors["inner.weight"], tensors["inner.bias"]
    points = {name: Point(**point) for name, point in about["points"].items()}
    for name, point in points.items():
        if not 0 <= point.low <= point.cutoff <= point.high <= 1:
            raise ProbeError(f"has no order in its points of {name!r}")
    return Probe(
        learnt=Learnt(
            Target(**learnt["target"]),
            learnt["question"],
            tuple(learnt["suffix"]),
            learnt["threshold"],
        ),
        layers=tuple(about["layers"]),
        hidden_size=about["hidden_size"],
        points=points,
        weight=tensors["weight"],
        bias=tensors["bias"],
        inner=inner,
        figures=about["figures"],
    )


def misfit(
    probe: Probe,
    *,
    target: Target | None = None,
    question: str | None = None,
    threshold: float | None = None,
    segmenter: str | None = None,
) -> str:
    """Why the probe is not for what is given, as the end of "PROBE ...", or ""."""
    learnt = probe.learnt
    if target is not None and target != learnt.target:
        part = "weights" if target.config == learnt.target.config else "configuration"
        return f"was learnt for another target (its {part} has another fingerprint)"
    if question is not None and question != learnt.question:
        return f"was learnt for the question {learnt.question!r}"
    if threshold is not None and threshold != learnt.threshold:
        return f"was learnt for the threshold {learnt.threshold:g}"
    if segmenter is not None and segmenter not in probe.points:
        return f"was learnt for the segmenter {_listed(tuple(probe.points))}"
    return ""


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))
