"""Whether this process serves PARSE: SGLang loads plugins, and their hooks, in every
process of every server."""

from __future__ import annotations

from sglang_parse.runtime.names import is_parse


def serves_parse() -> bool:
    """Whether the server of this process runs with --speculative-algorithm PARSE.

    False in a process whose configuration SGLang has not published (yet).
    """
    from sglang.srt.runtime_context import get_context, get_spec

    if not get_context().is_config_namespace_published("spec"):
        return False
    return is_parse(get_spec().speculative_algorithm)
