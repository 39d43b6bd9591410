"""DFLASH and DSpark drafts, loaded by SGLang, against the same weights in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_parse.judging.decide import decide, exact_cut
from tests.support.warm_servers import run_script

SCRIPT = Path(__file__).parents[1] / "support" / "block_child.py"


@pytest.mark.parametrize("markov", ["", "vanilla", "rnn"])
def test_blocks_are_those_of_plain_pytorch(tmp_path, markov):
    """Red if a block reads other context than the target's hidden states of the tokens
    before it, at their positions, or sees less than all of itself; or if a token of a
    DSpark draft does not depend on the one before it."""
    told = run_script(SCRIPT, str(tmp_path), markov, log=tmp_path / "log")
    assert "blocks agree" in told


def test_as_many_tokens_of_a_block_are_kept_as_sglangs_worker_keeps():
    """Red if SGLang's worker, which needs a GPU, would keep another number of the
    same block's tokens in front of the same choices of the target, or write another
    token behind them. With the test above: the accept length is that of its worker."""
    from sglang.kernels.ops.speculative.dflash import (
        compute_dflash_correct_drafts_and_bonus,
    )

    draw = torch.Generator().manual_seed(5)
    # The last token of the answer, then those of the block.
    blocks, choices = torch.randint(2, (2, 200, 6), generator=draw)
    lengths, behind = compute_dflash_correct_drafts_and_bonus(
        candidates=blocks, target_predict=choices
    )
    assert set(lengths.tolist()) == set(range(6))
    for block, choice, length, token in zip(
        *(one.tolist() for one in (blocks, choices, lengths, behind)), strict=True
    ):
        found = decide(exact_cut(5), block[1:], choice)
        assert found.num_correct_drafts == length
        assert found.accept_tokens == (*block[1 : 1 + length], token)
