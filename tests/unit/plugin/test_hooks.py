"""Hooks act where PARSE is served; a stock server is as if they were not there."""

import argparse
import inspect
from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context

from sglang_parse.cpu.platform import ParseCpuPlatform
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.plugin import gating, hooks
from sglang_parse.plugin.gating import AFTER, AROUND, BEFORE, serves_parse

pytestmark = pytest.mark.usefixtures("plugins")
UNGATED = {"add_cli_args", "from_cli_args"}


@pytest.fixture(params=["cpu", "cuda"])
def platform(request, monkeypatch):
    """SGLang's platform, and whether there is a device for it."""
    from sglang.srt import platforms

    is_cpu = request.param == "cpu"
    chosen = ParseCpuPlatform() if is_cpu else platforms.CudaSRTPlatform()
    monkeypatch.setattr(platforms, "_current_platform", chosen)
    monkeypatch.setattr("torch.cuda.is_available", lambda: not is_cpu)
    return request.param


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("PARSE", True), ("parse", True), ("EAGLE3", False), (None, False)],
)
def test_the_published_algorithm_decides(monkeypatch, algorithm, expected):
    """Red if hooks act on servers of other algorithms, or not on ours."""
    context = SimpleNamespace(is_config_namespace_published=lambda name: name == "spec")
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    assert serves_parse() is expected


def test_a_process_without_configuration_does_not():
    """Red if a hook raises before SGLang has published its arguments."""
    assert serves_parse() is False


def test_every_hook_of_parse_is_gated():
    """Red if a hook acts on servers that nobody asked PARSE for. The two others define
    the flags, and check that nobody gives them to another server."""
    shields = {seam.target for seam in hooks.SEAMS}
    ungated = {h.target for h in hooks.HOOKS if not h.is_gated} - shields
    assert {target.rpartition(".")[2] for target in ungated} == UNGATED


@pytest.mark.parametrize(
    ("kind", "args"), [(AFTER, (1, 2)), (BEFORE, (2,)), (AROUND, (max, 2, 1))]
)
@pytest.mark.parametrize("serves", [True, False])
def test_a_gated_hook_is_skipped_on_other_servers(monkeypatch, kind, args, serves):
    """Red if ours is called there, or SGLang's own result is lost."""
    monkeypatch.setattr(gating, "serves_parse", lambda: serves)
    called = gating.gate(lambda *a: ("ours", a), kind)(*args)
    assert called == (("ours", args) if serves else 2 if kind is AROUND else None)


@pytest.mark.parametrize("algorithm", ["PARSE", "parse", "EAGLE", None])
def test_steps_of_the_resolution_look_at_the_arguments(monkeypatch, algorithm):
    """Red if a step of ours runs for another server, or SGLang's own is lost."""
    from sglang.srt.arg_groups import overrides, resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    monkeypatch.setattr(overrides, "resolving_view", lambda args: args)
    calls = []
    gating.register_step("handle_hicache", lambda args: calls.append("ours"))
    args = SimpleNamespace(speculative_algorithm=algorithm)
    (step,) = resolution_hooks._HOOKS["handle_hicache"]
    step(args, lambda args: calls.append("theirs"))
    is_ours = algorithm in ("PARSE", "parse")
    assert calls == ["ours", "theirs"] if is_ours else ["theirs"]


def test_only_our_platform_has_the_hooks_of_the_cpu(platform):
    """Red if a server on a card runs a function that is made for CPU."""
    own = [h for h in hooks.active_hooks() if "sglang_parse.cpu" in h.ours]
    assert bool(own) == (platform == "cpu")


def flags_of(add_cli_args):
    """What SGLang's parser takes, by destination: everything that --help shows."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    fields = ("option_strings", "default", "choices", "help", "metavar", "nargs")
    return {
        action.dest: [str(getattr(action, name)) for name in fields]
        for action in parser._actions
    }


@pytest.mark.usefixtures("platform")
def test_the_flags_of_sglang_are_as_without_the_plugin():
    """Red if installing the plugin changes a flag of SGLang's, or its --help."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    def add_without_ours(parser):
        inspect.unwrap(ServerArgs.add_cli_args)(parser)
        target = "sglang.srt.server_args.ServerArgs.add_cli_args"
        for _, hook, source in HookRegistry._hooks[target]:
            if source.plugin_name != "parse":
                hook(None, parser)

    found, stock = flags_of(ServerArgs.add_cli_args), flags_of(add_without_ours)
    own = {dest for dest in found if dest.startswith("speculative_parse_")}
    assert own and {d: f for d, f in found.items() if d not in own} == stock


def test_a_stock_command_line_resolves_as_without_the_plugin(monkeypatch):
    """Red if arguments change on a server without PARSE."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.server_args import ServerArgs

    def resolved():
        args = ServerArgs(model_path=str(TARGET_PATH), random_seed=1)
        args.resolve_once()
        return {k: str(v) for k, v in vars(args).items() if k != "_model_config"}

    found = resolved()
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    assert resolved() == found


@pytest.mark.usefixtures("platform")
def test_requests_of_a_stock_server_are_sglangs_own():
    """Red if a request is checked or changed without PARSE: limits, `parse_*`."""
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_parse.shield.seams import is_shielded

    for function in (generate_contract_error, SamplingParams.verify):
        assert not hasattr(function, "__wrapped__")
    stock = SimpleNamespace(speculative_algorithm=None)
    assert not is_shielded(stock)
    # SGLang's own generator, which has not begun.
    manager = SimpleNamespace(server_args=stock)
    found = TokenizerManager.generate_request(manager, None)
    assert found.__qualname__ == "TokenizerManager.generate_request"
