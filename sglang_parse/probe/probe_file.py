"""A probe's file: safetensors with a weight, a bias, and JSON in its metadata."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from sglang_parse.probe.linear_probe import Learnt, Probe, ProbeError

FORMAT = "sglang_parse.probe/1"
MAX_BYTES = 1 << 20
KEY = "probe"
_NOT_ONE = "is no file of `python -m benchmarks.train_probe`"

Count = Annotated[int, Meta(ge=1)]


class ProbePoint(msgspec.Struct):
    """Where a probe cuts under one segmenter."""

    cutoff: Annotated[float, Meta(ge=0, le=1)]


class ProbeMetadata(msgspec.Struct):
    """The JSON in a file's metadata. Every value is checked, as the file may come from
    anybody."""

    format: Literal["sglang_parse.probe/1"]
    learnt: Learnt
    layers: tuple[Count, ...]
    hidden_size: Count
    points: dict[str, ProbePoint]
    figures: dict[str, Any]


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
            text = (opened.metadata() or {})[KEY]
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = msgspec.json.decode(text, type=ProbeMetadata)
        return _probe_of(about, tensors)
    except ProbeError:
        raise
    except OSError as e:
        raise ProbeError(f"cannot be read ({e.strerror or e})") from e
    except (SafetensorError, LookupError, RecursionError) as e:
        raise ProbeError(_NOT_ONE) from e
    except msgspec.MsgspecError as e:
        raise ProbeError(f"{_NOT_ONE} ({e})") from e


def _probe_of(about: ProbeMetadata, tensors: dict[str, Tensor]) -> Probe:
    if list(about.layers) != sorted({*about.layers}):
        raise ProbeError(f"has the layers {about.layers}; expected rising ones")
    for name in ("weight", "bias"):
        tensor = tensors[name]
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise ProbeError(
                f"has a {name} of {tensor.dtype} with "
                f"{int((~tensor.isfinite()).sum())} values that are not finite; "
                "expected finite torch.float32"
            )
    return Probe(
        learnt=about.learnt,
        layers=about.layers,
        hidden_size=about.hidden_size,
        cutoffs={name: point.cutoff for name, point in about.points.items()},
        weight=tensors["weight"],
        bias=tensors["bias"],
        figures=about.figures,
    )
