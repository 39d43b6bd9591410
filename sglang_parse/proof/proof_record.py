"""What earlier starts of the same server have proven, in a file.

An error of the device ends the process, and no code after it runs. So the file names a
path before it is tried: the next start finds it there, and leaves it off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sglang_parse.sgl.fast_paths import PROVEN

logger = logging.getLogger(__name__)

PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel")
# Arguments in which starts of the same server differ, beside SGLang's private ones, one
# of which is the command line with its port.
IGNORED = {"host", "port", "nccl_port", "dist_init_addr", "random_seed", "api_key"}
IGNORED |= {"admin_api_key", "log_level", "log_level_http", "served_model_name"}


def fingerprint(server_args: Any, config: Any, runners: Sequence[Any]) -> str:
    """Of the device, the versions, the models and the flags.

    config: ParseConfig. runners: the ModelRunners of all models.
    """
    device = ["cpu", os.uname().machine]
    if torch.cuda.is_available():
        driver = getattr(torch._C, "_cuda_getDriverVersion", str)()
        device = [str(torch.cuda.get_device_properties(0)), str(driver)]
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        source.update(path.read_bytes())
    flags = {
        k: v
        for k, v in vars(server_args).items()
        if k not in IGNORED and not k.startswith("_")
    }
    about = (
        device,
        versions,
        source.hexdigest(),
        [runner.model_config.hf_config.to_json_string() for runner in runners],
        sorted((k, v) for k, v in flags.items() if isinstance(v, str | int | float)),
        sorted((k, v) for k, v in vars(config).items() if k != "prove"),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


class ProofRecord:
    """The file of one fingerprint; what cannot be read or written is not recorded."""

    def __init__(self, name: str, *, writes: bool = True, marks: bool = True) -> None:
        """writes: False on all ranks but the first. marks: whether the file names a
        path before it is tried. On a CPU no path can end the process, only whoever
        stops the server can."""
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.path = Path(base) / "sglang_parse" / f"paths-{name}.json"
        self.writes, self.marks = writes, marks
        #: By path: `proven`, or the id of the process that tries it.
        self._paths: dict[str, str] = {}
        with suppress(OSError, ValueError, AttributeError):
            read = json.loads(self.path.read_text(encoding="utf-8"))
            self._paths = {str(k): str(v) for k, v in read.items()}

    def is_proven(self, name: str) -> bool:
        return self._paths.get(name) == PROVEN

    def has_died(self, name: str) -> bool:
        """Whether a process ended while it tried the path."""
        pid = self._paths.get(name, "")
        return pid.isdigit() and not Path(f"/proc/{pid}").exists()

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """For a path that is tried inside the block; an error leaves no mark."""
        if self.marks:
            self.set(name, str(os.getpid()))
        try:
            yield
        finally:
            if self.marks:
                self.set(name, "")

    def set(self, name: str, state: str) -> None:
        self._paths[name] = state
        if not self.writes:
            return
        text = json.dumps({k: v for k, v in self._paths.items() if v}, indent=1)
        part = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(self.path)
        except OSError as error:
            self.writes = False
            logger.info("PARSE: the proof of fast paths is not recorded: %s.", error)
