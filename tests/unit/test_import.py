"""What importing the package costs."""

import re
import subprocess
import sys
from pathlib import Path


def loaded(modules: list[str]) -> str:
    code = (
        f"import sys, importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print([m for m in ('torch', 'sglang', 'transformers') if m in sys.modules])"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_package_import_is_light():
    """Red if `import sglang_parse` loads torch, sglang or transformers."""
    assert loaded(["sglang_parse"]) == "[]"


def test_no_except_star():
    """Red if an error would come out in a group, and so as a traceback, on the Python
    3.11.2 of Debian 12."""
    root = Path(__file__).parents[2]
    for folder in ("sglang_parse", "programs", "benchmarks"):
        for path in (root / folder).rglob("*.py"):
            assert "except*" not in re.sub("#.*", "", path.read_text("utf-8")), path
