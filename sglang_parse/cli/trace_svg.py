"""A picture of one traced answer as SVG, as a terminal would show it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from sglang_parse.cli.trace_text import printable

TITLE = "sglang-parse trace"
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


def render(prompt: str, draw: Callable[[Console], None]) -> str:
    """The SVG file: the question, then what `draw` prints on a console.

    The same text gives the same file. It names no address, so it loads nothing.
    """
    console = Console(
        record=True,
        file=io.StringIO(),
        width=WIDTH,
        color_system="truecolor",
        force_terminal=True,
        _environ={},
    )
    console.print(Text(printable(prompt.strip()), "bold"), highlight=False)
    console.print()
    draw(console)
    return console.export_svg(
        title=TITLE, theme=THEME, code_format=_local_format(), unique_id="parse-trace"
    )


def _local_format() -> str:
    """rich's template with the reader's own fonts, where rich's loads them by URL.

    Lines have clips of their own; rich's clip of them all cuts the last one's letters.
    """
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S)
    template = re.sub(r"<!--.*?-->", "", template, flags=re.S)
    template = template.replace("Fira Code, monospace", FONTS)
    template = template.replace(' clip-path="url(#{unique_id}-clip-terminal)"', "")
    return re.sub(r"[ \t]*\n\s*\n", "\n", template)
