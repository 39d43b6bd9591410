"""DFLASH and DSpark drafts, loaded by SGLang, against the same weights in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.warm_servers import run_script

SCRIPT = Path(__file__).parents[1] / "support" / "block_child.py"


@pytest.mark.parametrize("markov", ["", "vanilla", "rnn"])
def test_blocks_are_those_of_plain_pytorch(tmp_path, markov):
    """Red if a block reads other context than the target's hidden states of the tokens
    before it, at their positions, or sees less than all of itself; or if a token of a
    DSpark draft does not depend on the one before it."""
    told = run_script(SCRIPT, str(tmp_path), markov, log=tmp_path / "log")
    assert "blocks agree" in told
