"""The commands that the documents show in blocks of shell."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / name / "README.md" for name in ("benchmarks", "programs")),
)


def commands() -> Iterator[tuple[Path, list[str]]]:
    """(page, words) of each. A command may have several lines inside quotes."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            text = ""
            for line in block.replace("\\\n", " ").splitlines():
                text += line
                try:
                    words = shlex.split(text, comments=True)
                except ValueError:  # a quote is still open
                    text += "\n"
                    continue
                text = ""
                if words:
                    yield page, words
