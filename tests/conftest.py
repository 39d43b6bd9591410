"""Shared by all tests: SGLang with our plugin loaded."""

import os

import pytest

os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")  # of servers started here
# Tests start stock servers too, and resolve arguments in this process.
os.environ.setdefault("SGLANG_PARSE_CPU_PLATFORM", "1")
# Masks of llguidance and rotary positions of images are compiled else, for a minute.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


@pytest.fixture(scope="session")
def plugins():
    """SGLang's plugins loaded into this process, as every SGLang process does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
