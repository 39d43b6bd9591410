"""Triton kernels of a pass compile for Hopper, on a machine without a card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "triton_compile.py"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Bytes of machine code by kernel, in a process of its own: Triton takes the
    machine for one without a GPU here."""
    cache = str(tmp_path_factory.mktemp("triton"))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=600,
        env=env | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_of_a_pass_compile_for_hopper(compiled):
    """Red if a kernel that a pass uses has no machine code for sm_90 with the types
    that PARSE hands it."""
    assert set(compiled) == {"columns of a pass", "attention of a pass"}
    for name, found in compiled.items():
        assert found["target"] == ".target sm_90a", name
        assert found["bytes"] > 1000, name
