"""PARSE (arXiv:2605.04263) as an out-of-tree plugin for stock SGLang.

Importing this package loads neither torch nor sglang; the primitives for SGLang
programs load both when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_parse.frontend import parse_gen as parse_gen
    from sglang_parse.frontend import parse_verify as parse_verify

__version__ = "0.5.23.post1"
__all__ = ["__version__", "parse_gen", "parse_verify"]


def __getattr__(name: str) -> Any:
    if name not in ("parse_gen", "parse_verify"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang_parse import frontend

    return getattr(frontend, name)
