"""What servers and engines of the tests import, and their plugins, done once.

They are forked from a process that has imported this module. SGLang looks through all
modules for each function that a plugin hooks, which takes seconds in each process.
"""

import sglang.srt.entrypoints.http_server
import sglang.srt.models.registry  # noqa: F401 - every model's module
from sglang.srt.plugins import load_plugins

import sglang_parse.plugin.worker  # noqa: F401

load_plugins()
