"""SGLang's Triton kernels compile for the GPUs of servers, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract_source  # half a minute of compiling
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


KERNELS = {
    "columns": {"create_flashinfer_kv_indices_triton", "assign_req_to_token_pool"},
    "passes": {"_fwd_kernel"},
    "steps_of_single_heads": {
        *("get_num_kv_splits_triton", "_fwd_kernel_stage1", "_fwd_kernel_stage2")
    },
    "steps_of_groups": {
        *("get_num_kv_splits_triton", "_fwd_grouped_kernel_stage1"),
        "_fwd_kernel_stage2",
    },
    "grammars": {"apply_token_bitmask_inplace_kernel"},
}
KERNELS["steps_of_latent_attention"] = KERNELS["steps_of_groups"]


@pytest.mark.parametrize(("arch", "target"), [(90, "sm_90a"), (100, "sm_100a")])
@pytest.mark.parametrize("use", KERNELS)
def test_kernels_have_machine_code(compiled, use, arch, target):
    """Red if a kernel of a pass, a decode step or a grammar has no machine code with
    the types that PARSE hands it, or SGLang launches another one."""
    mine = {
        name.split()[-1]: found
        for name, found in compiled.items()
        if name.startswith(f"sm_{arch} {use} ")
    }
    assert set(mine) == KERNELS[use]
    for name, found in mine.items():
        assert found["target"] == f".target {target}", name
        assert found["bytes"] > 1000, name
