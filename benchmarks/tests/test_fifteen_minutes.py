# ruff: noqa: E402
"""The script for a lent card, with a stand-in for what it starts. The whole of it runs
on a CPU by `benchmarks/gpu/fifteen_minutes.sh OUT --dry`, in six minutes or more."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import fast_paths, serve
from benchmarks.gpu.arms import arms_of
from sglang_parse.sgl.architecture import LATENT_BACKENDS, WINDOW_BACKENDS
from sglang_parse.verify.backends.routes import BACKENDS
from tests.gpu import test_server_gpu

SCRIPT = ROOT / "benchmarks" / "gpu" / "fifteen_minutes.sh"
SERVED = {"tiny-latent": LATENT_BACKENDS, "tiny-windows": WINDOW_BACKENDS}
# Writes down how it is called, and fails where the call holds $FAILS.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >> "$PLAN"
[[ -z "$FAILS" || "$*" != *"$FAILS"* ]]
"""


@pytest.fixture
def script(tmp_path):
    """Runs the script; gives its status, what it printed, and the calls in turn."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python", "nvidia-smi", "uname"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)

    def run(*flags, fails=""):
        plan = tmp_path / "plan"
        plan.write_text("")
        env = {
            **{
                "PATH": f"{tools}:{os.environ['PATH']}",
                "PYTHON": str(tools / "python"),
            },
            **{"PLAN": str(plan), "FAILS": fails},
        }
        done = subprocess.run(
            ["bash", str(SCRIPT), str(tmp_path / "out"), *flags],
            capture_output=True,
            text=True,
            timeout=60,
            env=env,
        )
        return done.returncode, done.stdout, plan.read_text().splitlines()

    return run


def check_call(call):
    """Red if a call names a flag, a pair, an arm or a test that does not exist, or a
    backend that the server refuses for the pair."""
    module, *arguments = shlex.split(call)[1:]
    if module == "pytest":
        names = call.partition(" -k ")[2].split(" or ")
        known = [*test_server_gpu.SERVERS, *vars(test_server_gpu)]
        assert all(any(n in one for one in known) for n in names), names
        assert "tests/gpu/test_server_gpu.py" in arguments
        return module
    of = {"benchmarks.gpu.fast_paths": fast_paths, "benchmarks.gpu.serve": serve}
    args = of[module].parser().parse_args(arguments)
    if module.endswith("serve"):
        assert {a.name for a in arms_of(args)} == set(args.arms)
    for kind, served in SERVED.items():
        if args.backend is not None and kind in args.pair:
            assert args.backend in served, (kind, args.backend)
    assert args.backend is None or args.backend in BACKENDS
    return module.rsplit(".", 1)[1]


@pytest.mark.parametrize("flags", [(), ("--dry",)])
def test_every_step_can_be_started_and_the_most_valuable_is_first(script, flags):
    """Red if a step would end in its arguments, which costs the card's time, or what
    says which paths are right comes after what says how fast they are."""
    status, printed, (machine, *calls) = script(*flags)
    assert status == 0, printed
    seen = list(dict.fromkeys(map(check_call, calls)))
    assert seen == ["fast_paths", "pytest", "serve"]
    limits = [
        int(line.split()[4]) for line in printed.splitlines() if "at most" in line
    ]
    # Whole servers take what is left.
    assert len(limits) == 1 + len(calls) and sum(limits[:-1]) <= 840
    assert machine == ("-a" if flags else "")


def test_a_failed_step_costs_no_other_and_is_tried_again(script):
    """Red if a card's time ends with the first step that fails, or what was measured is
    measured again."""
    status, _, calls = script(fails="--backend fa3")
    assert status == 1
    failed = [call for call in calls if "--backend fa3" in call]
    assert len(failed) == 2 and "benchmarks.gpu.serve" in calls[-1]
    status, printed, again = script()
    assert (status, again) == (0, failed), printed
