"""SGLang's application in each process, where several serve HTTP.

With `--tokenizer-worker-num`, uvicorn starts processes that import the application by
name, and SGLang loads no plugins in them. The name that it gives comes from the
environment, where `openai.prepare_http` puts this module's.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`app`, with what the plugin adds; uvicorn asks for it once, before it serves."""
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.multi_tokenizer_mixin import (
        get_main_process_id,
        read_from_shared_memory,
    )

    from sglang_parse.plugin.openai import add_endpoints
    from sglang_parse.shield.guards import add_shield

    shared = f"multi_tokenizer_args_{get_main_process_id()}"
    _, server_args, _ = read_from_shared_memory(shared)
    add_endpoints(server_args)
    add_shield(server_args)
    return app
