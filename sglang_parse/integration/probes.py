"""The probe of a server: read, checked against the target, and its layers."""

from __future__ import annotations

from typing import Any

from sglang_parse.judging.probe import (
    Probe,
    ProbeError,
    load_probe,
    misfit,
    usual_layers,
)
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import flag_name
from sglang_parse.runtime.fingerprint import fingerprint


def read_probe(server_args: Any, config: ParseConfig) -> Probe | None:
    """The server's probe, None without one.

    Raises ValueError, naming the flag and the file, where the file is none or was
    learnt for another target, question, threshold or segmenter than the server's.
    """
    if not config.probe:
        return None
    place = f"{flag_name('probe')} {config.probe!r}"
    try:
        probe = load_probe(config.probe)
    except ProbeError as e:
        raise ValueError(f"{place} {e}.") from e
    try:
        target = fingerprint(
            server_args.model_path, getattr(server_args, "revision", None)
        )
    except ValueError as e:
        raise ValueError(
            f"--model-path {server_args.model_path!r} {e}; expected a model folder "
            f"with {flag_name('probe')}, which is bound to its weights."
        ) from e
    if told := misfit(probe, target=target):
        raise ValueError(
            f"{place} {told}; expected one of --model-path {server_args.model_path!r}."
        )
    for name in ("judge_suffix", "threshold", "segmenter"):
        value = getattr(config, name)
        key = {"judge_suffix": "question"}.get(name, name)
        if told := misfit(probe, **{key: value}):
            raise ValueError(
                f"{place} {told}, and {flag_name(name)} is {value!r}; expected the "
                "same."
            )
    return probe


def layers_to_show(probe: Probe | None, num_layers: int) -> tuple[int, ...]:
    """The layers that a probe reads, or that pairs for one are kept of."""
    return probe.layers if probe is not None else usual_layers(num_layers)
