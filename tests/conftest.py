"""Shared by all tests: the oracles of reference.py, SGLang with our plugin loaded."""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")  # of servers started here
sys.path[:0] = [str(TESTS), str(TESTS / "integration")]


@pytest.fixture(scope="session")
def plugins():
    """SGLang's plugins loaded into this process, as every SGLang process does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
