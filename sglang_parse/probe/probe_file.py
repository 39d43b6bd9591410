"""A probe's file: safetensors with a weight, a bias, and JSON in its metadata."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_parse.options.validation import shown
from sglang_parse.probe.linear_probe import (
    Learnt,
    Probe,
    ProbeError,
    TargetHashes,
)

FORMAT = "sglang_parse.probe/1"
MAX_BYTES = 1 << 20
KEY = "probe"
_NOT_ONE = "is no file of `python -m benchmarks.train_probe`"


def load_probe(path: str | Path) -> Probe:
    """Read a file of `benchmarks.train_probe`. Raises ProbeError on anything else."""
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ProbeError("is not a regular file")
        if found.st_size > MAX_BYTES:
            raise ProbeError(f"has {found.st_size} bytes; expected at most {MAX_BYTES}")
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[KEY])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return _probe_of(about, tensors)
    except ProbeError:
        raise
    except (OSError, ValueError) as e:
        if isinstance(e, OSError):
            raise ProbeError(f"cannot be read ({e.strerror or e})") from e
        raise ProbeError(_NOT_ONE) from e
    except (SafetensorError, LookupError, TypeError, AttributeError) as e:
        raise ProbeError(_NOT_ONE) from e
    except RecursionError:
        raise ProbeError(_NOT_ONE) from None


def _probe_of(about: dict[str, Any], tensors: dict[str, Tensor]) -> Probe:
    """Every value is checked, as the file may come from anybody."""
    _check(about["format"], "format", lambda x: x == FORMAT, repr(FORMAT))
    learnt, layers, size = about["learnt"], about["layers"], about["hidden_size"]
    for name in ("config", "weights"):
        _check(learnt["target"][name], f"target's {name}", _is_text, "a hash")
    _check(learnt["question"], "question", _is_text, "text")
    _check(
        learnt["suffix"],
        "suffix",
        lambda x: bool(x) and all(_is_count(token, 0) for token in x),
        "a list of token ids",
    )
    _check(learnt["threshold"], "threshold", _is_finite, "a number")
    _check(
        layers,
        "layers",
        lambda x: all(_is_count(n, 1) for n in x) and x == sorted({*x}),
        "rising whole numbers from 1",
    )
    _check(size, "hidden_size", lambda x: _is_count(x, 1), "a whole number from 1")
    cutoffs = {name: point["cutoff"] for name, point in about["points"].items()}
    for name, value in cutoffs.items():
        _check(
            value,
            f"cutoff of {name!r}",
            lambda x: _is_finite(x) and 0 <= x <= 1,
            "a number from 0 to 1",
        )
    for name in ("weight", "bias"):
        tensor = tensors[name]
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ProbeError(
                f"has a {name} of {tensor.dtype} with "
                f"{int((~tensor.isfinite()).sum())} values that are not finite; "
                "expected finite torch.float32"
            )
    return Probe(
        learnt=Learnt(
            TargetHashes(**learnt["target"]),
            learnt["question"],
            tuple(learnt["suffix"]),
            learnt["threshold"],
        ),
        layers=tuple(layers),
        hidden_size=size,
        cutoffs=cutoffs,
        weight=tensors["weight"],
        bias=tensors["bias"],
        figures=about["figures"],
    )


def _check(value: Any, name: str, holds: Callable[[Any], bool], expected: str) -> None:
    try:
        held = holds(value)
    except TypeError:
        held = False
    if not held:
        raise ProbeError(f"has the {name} {shown(value)}; expected {expected}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
