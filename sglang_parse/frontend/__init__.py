"""PARSE in SGLang programs: `parse_gen` and `parse_verify` inside `@sgl.function`."""

from sglang_parse.frontend.adapter import ParseUnavailableError
from sglang_parse.frontend.primitives import parse_gen, parse_verify

__all__ = ["ParseUnavailableError", "parse_gen", "parse_verify"]
