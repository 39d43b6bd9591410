"""What a pass as decode rows needs of SGLang's sparse attention with an index: each row
reads its own prefix, and finds what the rows before it have written."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

from tests.support.sparse_rows import PAGE, REQUESTS, TOPK, table

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "sparse_rows.py"


@pytest.fixture(scope="module")
def found():
    """What SGLang's backend makes of a pass."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("step", ["eager", "captured"])
def test_each_row_of_a_pass_reads_its_own_prefix(found, step):
    """Red if SGLang takes a row's length or pages from its request, from another row or
    from the batch that was captured, or our pass asks for others."""
    slots, read, at = table(), found[step], 0
    for row, num_before, num_drafted in REQUESTS:
        for place in range(num_before, num_before + num_drafted + 1):
            length = place + 1
            assert read["lens"][at] == length
            assert read["selected"][at] == min(length, TOPK)
            pages = [int(slots[row, n]) // PAGE for n in range(0, length, PAGE)]
            assert read["pages"][at] == pages
            assert found["positions"][at] == place
            assert found["written"][at] == int(slots[row, place])
            at += 1
    assert len(read["lens"]) == at and read["queries"] == 1


def test_the_scores_of_a_captured_step_are_divided_by_its_own_lengths(found):
    """Red if the blocks that score the index keys follow other rows' lengths."""
    assert found["captured"]["scheduled"] == found["captured"]["lens"]


@pytest.mark.parametrize(
    ("function", "stores", "reads"),
    [
        (
            Indexer.forward_cuda,
            ("self._fused_q_prepare_and_store(", "self._store_index_k_cache("),
            "self._get_topk_paged(",
        ),
        (
            DeepseekSparseAttnBackend.forward_decode,
            ("self.token_to_kv_pool.set_mla_kv_buffer(",),
            "self.token_to_kv_pool.get_key_buffer(",
        ),
        (
            DeepseekSparseAttnBackend._forward_trtllm,
            ("set_mla_kv_buffer(",),
            "get_key_buffer(",
        ),
    ],
)
def test_all_rows_are_stored_before_any_is_read(function, stores, reads):
    """Red if a layer scores or attends before the keys of the whole batch lie in the
    pool: a row would miss the rows before it."""
    text = inspect.getsource(function)
    assert all(name in text for name in stores)
    assert max(map(text.rindex, stores)) < text.index(reads)
