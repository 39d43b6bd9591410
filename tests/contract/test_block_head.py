"""DFLASH and DSpark drafts, loaded by SGLang, against the same weights in PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("markov", ["", "vanilla", "rnn"])
def test_blocks_are_those_of_plain_pytorch(tmp_path, markov):
    """Red if a block reads other context than the target's hidden states of the tokens
    before it, at their positions, or sees less than all of itself; or if a token of a
    DSpark draft does not depend on the one before it."""
    command = (sys.executable, "-m", "tests.support.block_child", str(tmp_path))
    command += (markov,) if markov else ()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "blocks agree" in done.stdout
