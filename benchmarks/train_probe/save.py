"""Writes a probe's file, which `sglang_parse.probe.probe_file` reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from sglang_parse.probe.linear_probe import Probe, ProbeError
from sglang_parse.probe.probe_file import FORMAT, KEY, MAX_BYTES


def save_probe(probe: Probe, path: Path) -> None:
    """Write a safetensors file. Raises ProbeError where it would exceed MAX_BYTES."""
    from safetensors.torch import save

    about = {
        "format": FORMAT,
        "learnt": asdict(probe.learnt),
        "layers": list(probe.layers),
        "hidden_size": probe.hidden_size,
        "points": {name: {"cutoff": value} for name, value in probe.cutoffs.items()},
        "figures": dict(probe.figures),
    }
    tensors = {"weight": probe.weight, "bias": probe.bias}
    whole = {name: t.detach().cpu().float() for name, t in tensors.items()}
    data = save(whole, metadata={KEY: json.dumps(about, sort_keys=True)})
    if len(data) > MAX_BYTES:
        raise ProbeError(f"would have {len(data)} bytes; expected at most {MAX_BYTES}")
    path.write_bytes(data)
