"""When the CPU platform takes the machine, and what it promises SGLang."""

import subprocess
import sys

import pytest
import torch
from sglang.srt import platforms
from torch.profiler import ProfilerActivity

from sglang_parse.cpu import entry as platform_entry
from sglang_parse.cpu import platform as cpu_platform
from sglang_parse.cpu.entry import SWITCH_ENV, activate
from sglang_parse.cpu.platform import ParseCpuPlatform

OURS = "sglang_parse.cpu.platform:ParseCpuPlatform"
PROBES = ("cuda", "rocm", "npu", "xpu", "musa", "mps")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No accelerator, no environment variable: what CI has."""
    for name in (SWITCH_ENV, "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name in PROBES:
        monkeypatch.setattr(platforms, f"_is_{name}_available", lambda: False)


FLAG = "--speculative-algorithm"


@pytest.fixture
def command_line(monkeypatch):
    def give(*argv):
        monkeypatch.setattr(sys, "argv", ["launch_server.py", *argv])

    give(FLAG, "PARSE")
    return give


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        *(
            ((FLAG, "PARSE"), True),
            ((f"{FLAG}=parse",), True),
            ((FLAG[:20], "p"), False),
        ),
        *(((), False), ((FLAG,), False), ((FLAG, "EAGLE"), False)),
        *((("--served-model-name", "PARSE"), False), ((FLAG[:20], "Parse"), True)),
    ],
)
def test_the_command_line_asks_for_the_platform(command_line, argv, ours):
    """Red if a PARSE server on a CPU needs an environment variable, or a stock one gets
    our platform without asking."""
    command_line("--model-path", "m", *argv)
    assert activate() == (OURS if ours else None)


@pytest.mark.parametrize(("value", "ours"), [("0", False), ("1", True)])
@pytest.mark.parametrize("argv", [(), (FLAG, "PARSE")])
def test_the_switch_decides_for_any_server(
    command_line, monkeypatch, argv, value, ours
):
    """Red if the platform cannot be switched on for a stock server, or off."""
    command_line(*argv)
    monkeypatch.setenv(SWITCH_ENV, value)
    assert activate() == (OURS if ours else None)


@pytest.mark.usefixtures("command_line")
@pytest.mark.parametrize("name", PROBES)
def test_accelerator_is_left_to_its_platform(monkeypatch, name):
    """Red if a host with this accelerator would serve on its CPU."""
    monkeypatch.setattr(platforms, f"_is_{name}_available", lambda: True)
    assert activate() is None


def test_platform_asked_for_by_name_decides(monkeypatch):
    """Red if ours, named, needs a bare machine."""
    monkeypatch.setattr(platforms, "_is_cuda_available", lambda: True)
    monkeypatch.setenv("SGLANG_PLATFORM", "parse_cpu")
    assert activate() == OURS


@pytest.mark.usefixtures("command_line")
def test_stock_cpu_engine_is_left_alone(monkeypatch):
    """Red if we take a machine whose user asked for SGLang's own CPU engine."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_entry_point_resolves_to_this_function_and_class():
    """Red if the entry point's name, target or returned class no longer exist."""
    import pkgutil
    from importlib.metadata import entry_points

    found = {e.name: e for e in entry_points(group="sglang.srt.platforms")}
    assert found["parse_cpu"].load() is activate
    assert pkgutil.resolve_name(OURS) is ParseCpuPlatform


def test_platform_is_found_whatever_is_imported_first():
    """Red if importing our entry points before sglang loses the platform.

    SGLang resolves the platform while it is imported; a module of ours that is only
    half imported by then has no activate().
    """
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    code = (
        "import sglang_parse.plugin.register, sglang_parse.cpu.entry\n"
        "from sglang.srt.platforms import current_platform\n"
        "print(type(current_platform).__name__)"
    )
    command = [sys.executable, "-c", code, FLAG, "PARSE"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["ParseCpuPlatform"], done.stderr[-500:]


def test_every_probe_of_sglang_is_asked():
    """Red if SGLang gains a kind of accelerator that activate() does not know."""
    import inspect

    source = inspect.getsource(platform_entry._has_accelerator)
    known = {n for n in dir(platforms) if n.startswith("_is_")}
    # SAIL devices answer torch.cuda.is_available() as well; CPU is no accelerator.
    known -= {"_is_cpu_available", "_is_sail_available"}
    assert known == {n for n in known if n in source}


class Args:
    """ServerArgs as far as the defaults look at it."""

    device = None
    attention_backend = None
    dtype = "auto"
    max_total_tokens = None
    max_running_requests = None
    page_size = None
    sampling_backend = None
    moe_runner_backend = "auto"
    disable_overlap_schedule = False
    cuda_graph_backend_decode = None
    cuda_graph_backend_prefill = None
    tp_size = dp_size = 1
    sleep_on_idle = False


def test_defaults_fill_what_is_open():
    """Red if a CPU server starts without one of the settings it needs."""
    args = Args()
    ParseCpuPlatform().apply_server_args_defaults(args)
    assert args.device == "cpu"
    assert args.attention_backend == "parse_torch"
    assert args.dtype == "float32"
    assert args.max_total_tokens == cpu_platform.DEFAULT_MAX_TOTAL_TOKENS
    assert args.page_size == 1
    assert args.disable_overlap_schedule
    assert args.sampling_backend == "pytorch"
    assert args.cuda_graph_backend_decode == "disabled"


def test_defaults_respect_what_the_user_set():
    """Red if the platform overrides a flag."""
    args = Args()
    args.attention_backend = "torch_native"
    args.dtype = "bfloat16"
    args.max_total_tokens = 600
    args.max_running_requests = 3
    ParseCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "torch_native"
    assert args.dtype == "bfloat16"
    assert args.max_total_tokens == 600
    assert args.max_running_requests == 3


def test_what_sglang_asks_of_the_platform():
    """Red if a pool kind without a Triton-free class is claimed, if EAGLE starts here
    and dies in a Triton kernel, or if `/start_profile` stops a server, which has no
    other answer (profiler_manager.py, `_start_profile`)."""
    from sglang_parse.cpu.ops import CpuMHATokenToKVPool

    platform = ParseCpuPlatform()
    assert platform.get_kv_pool_cls(kind="mha") is CpuMHATokenToKVPool
    assert platform.get_kv_pool_cls(kind="mla") is None
    assert platform.supports_speculative_algorithm("PARSE")
    assert not platform.supports_speculative_algorithm("EAGLE")
    name = platform.get_torch_profiler_activity_str()
    activity = platform.get_torch_profiler_activity()
    assert activity == getattr(ProfilerActivity, name)


def test_ranks_share_the_cores_of_the_process():
    """Red if --tp 2 is refused on a machine with one NUMA node, or ranks get none."""
    from sglang_parse.cpu.platform import share_cores

    assert share_cores(2, 1, [0, 1, 2, 3, 4]) == "0,2,4|1,3"
    assert share_cores(2, 1, [5]) == "5|5"
    assert share_cores(3, 2, [0, 1]) == "0|1|0,1"
    # A rank with a NUMA node of its own is left to SGLang.
    assert share_cores(1, 1, [0, 1]) is share_cores(2, 2, [0, 1]) is None
