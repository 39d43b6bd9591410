"""Draws docs/assets/trace.svg: one traced answer, as a terminal would show it.

python docs/trace_picture.py "QUESTION" [--url URL] [--svg FILE]
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from sglang_parse.cli.trace import Trace, TraceOptions, ask, show
from sglang_parse.cli.trace_text import printable

WIDTH = 96  # columns of the drawn terminal: the legend takes one line
THEME = TerminalTheme(
    (36, 39, 43),
    (214, 218, 223),
    [
        (75, 78, 85),
        (240, 98, 98),  # red: rejected
        (98, 205, 120),  # green: kept
        (245, 196, 66),  # yellow: written by the target
        (96, 138, 177),
        (200, 134, 220),  # magenta: the client's text
        (92, 188, 224),  # cyan: equal to the target's own choice
        (197, 200, 198),
    ],
)
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def picture_of(trace: Trace) -> str:
    """The SVG file, which loads nothing; the same trace gives the same file."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=WIDTH,
        color_system="truecolor",
        force_terminal=True,
        _environ={},
    )
    console.print(Text(printable(trace.prompt.strip()) + "\n", "bold"))
    show(trace, console)
    return console.export_svg(
        title="sglang-parse trace",
        theme=THEME,
        code_format=local_format(),
        unique_id="parse-trace",
    )


def local_format() -> str:
    """rich's template with the reader's own fonts, where rich loads them by URL, and
    without its frame, which cuts the last line's letters."""
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
    template = re.sub(r"<!--.*?-->", "", template, flags=re.S)
    template = template.replace("Fira Code, monospace", FONTS)
    template = template.replace(' clip-path="url(#{unique_id}-clip-terminal)"', "")
    return re.sub(r"[ \t]*\n\s*\n", "\n", template)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", help="the question")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--svg", type=Path, default=Path("docs/assets/trace.svg"))
    args = parser.parse_args()
    trace = ask(TraceOptions(args.url, args.prompt))
    args.svg.write_text(picture_of(trace), encoding="utf-8", errors="replace")
