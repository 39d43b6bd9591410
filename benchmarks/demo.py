"""`sglang-parse demo` with a file of its figures that says where it was made.

python -m benchmarks.demo FILE [flags of the demo]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance, shown_path
from sglang_parse.cli import main as cli


def with_provenance(data: dict[str, Any]) -> dict[str, Any]:
    """The figures with the command and machine, and paths without their folders."""
    paths = ("target", "draft", "head")
    shown = {name: shown_path(data[name]) for name in paths if data[name]}
    return {**data, **shown, "provenance": provenance()}


if __name__ == "__main__":
    file, *flags = sys.argv[1:]
    if status := cli.main(["demo", "--json", file, *flags]):
        raise SystemExit(status)
    path = Path(file)
    data = with_provenance(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
