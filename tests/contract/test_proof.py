"""The proof at start over SGLang's own captured graphs: what is right passes, and each
fault is found by the path that it is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_parse.sgl.fast_paths import PATHS
from tests.support.warm_servers import run_script

SCRIPT = Path(__file__).parents[1] / "support" / "proof_child.py"
FAULTS = (
    *("target_steps: stale_length", "target_steps: stale_tokens"),
    *("target_steps: wrong_bucket", "draft_steps: stale_length"),
    *("draft_steps: stale_tokens", "draft_steps: wrong_bucket"),
    *("draft_steps: raises", "head_steps: states are not loaded"),
    *("route_mask: slot freed early", "route_virtual: wrong slots"),
    *("short_passes: wrong place", "guessed_rows: wrong place"),
    *("pass_graphs: stale_tokens", "pass_graphs: stale_positions"),
    "head_prefills: stale_states",
)


SPARSE_FAULTS = (
    *("target_steps: stale_tokens", "short_passes: wrong place"),
    "short_passes: oldest tokens",
)


def states_found(folder: Path, *kind: str):
    """By fault: the states of the paths that were tried."""
    told = run_script(SCRIPT, str(folder), *kind, log=folder / "log")
    lines = [line[6:] for line in told.splitlines() if line[:6] == "found "]
    return {one["fault"]: one["paths"] for one in map(json.loads, lines)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return states_found(tmp_path_factory.mktemp("proof"))


@pytest.fixture(scope="module")
def found_sparse(tmp_path_factory):
    return states_found(tmp_path_factory.mktemp("sparse"), "sparse")


def test_all_that_a_server_captures_is_proven(found):
    """Red if the proof finds fault with what is right, or tries less than there is."""
    states = {name: one["state"] for name, one in found["none"].items()}
    assert set(states) == {*PATHS} - {"route_rows"}  # fa3's
    assert set(states.values()) == {"proven"}
    assert max(one["difference"] or 0 for one in found["none"].values()) < 1e-4


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_at_start(found, fault):
    """Red if a server with this fault serves by the path that it is in."""
    (one,) = found[fault].values()
    assert one["state"] == "off", one
    assert "differ" in one["why"] or "a fault of the test" in one["why"]


def test_no_fault_is_left_out(found):
    """Red if the process tries a fault that no test looks at."""
    assert {*FAULTS, "none"} == set(found)


def test_a_chain_of_rows_with_sparse_attention_is_proven(found_sparse):
    """Red if a target whose passes are decode rows alone is not proven, or is by a path
    that it has not."""
    states = {name: one["state"] for name, one in found_sparse["none"].items()}
    assert states.pop("pass_graphs") == "absent"
    proven = ("target_steps", "short_passes", "draft_steps", "guessed_rows")
    assert states == dict.fromkeys((*proven, "sampled_rows"), "proven")


@pytest.mark.parametrize("fault", SPARSE_FAULTS)
def test_each_fault_of_sparse_attention_is_found_at_start(found_sparse, fault):
    """Red if a server drafts with this fault; the last one is seen in contexts from
    which an index leaves tokens out, and in no shorter one."""
    (one,) = found_sparse[fault].values()
    assert one["state"] == "off" and "differ" in one["why"], one
