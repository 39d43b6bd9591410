"""How SGLang loads us: version, entry points, hooks."""

import pkgutil
from importlib.metadata import entry_points

import pytest
import sglang

from sglang_parse.plugin import hooks
from sglang_parse.plugin.cpu_hooks import CPU_HOOKS

pytestmark = pytest.mark.usefixtures("plugins")
ALL_HOOKS = {
    target: h
    for h in reversed(hooks.HOOKS + CPU_HOOKS)
    if h.kind
    for target, _ in h.pairs
}
FUNCTIONS = sorted({ours for h in hooks.HOOKS + CPU_HOOKS for _, ours in h.pairs})


def test_installed_sglang_is_the_pinned_one():
    """Red if the pin in pyproject.toml and the installed version drift apart."""
    assert sglang.__version__ == "0.5.23"


def test_entry_point_registers_the_algorithm():
    """Red if SGLang's plugin loader swallowed an error of ours."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.plugin.algorithm import ParseAlgorithm

    found = {e.name: e.value for e in entry_points(group="sglang.srt.plugins")}
    assert found["parse"] == "sglang_parse.plugin.register:register"
    assert isinstance(SpeculativeAlgorithm.from_string("PARSE"), ParseAlgorithm)


@pytest.mark.parametrize("target", ALL_HOOKS)
def test_hook_target_exists(target):
    """Red if SGLang renames or moves this seam."""
    assert callable(pkgutil.resolve_name(target))


def test_hooks_are_applied_in_a_process_that_loads_plugins():
    """Red if one of our hooks does not apply; SGLang would only log it."""
    hooks.check_hooks.cache_clear()
    hooks.check_hooks()


@pytest.mark.parametrize("ours", FUNCTIONS)
def test_hook_function_exists(ours):
    """Red if one of our functions moves and its hook, which imports it when it is first
    called, does not follow."""
    assert ours.startswith("sglang_parse.")
    assert callable(pkgutil.resolve_name(ours))


def test_there_are_at_most_25_hooks():
    """Red if a hook joins without another going; rows on one target count once."""
    rows = {h.target for h in hooks.HOOKS} | {h.target for h in CPU_HOOKS}
    assert len(rows) <= 25


@pytest.mark.parametrize("target", ALL_HOOKS)
def test_missing_hook_stops_startup_by_name(monkeypatch, target):
    """Red if a server can start without one of its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    hooks.check_hooks.cache_clear()
    with pytest.raises(RuntimeError, match=target) as error:
        hooks.check_hooks()
    assert sglang.__version__ in str(error.value)
    assert ALL_HOOKS[target].purpose in str(error.value)
    assert "\n" not in str(error.value)


def test_attention_backend_is_known_by_name():
    """Red if our backend is no choice of --attention-backend or is not registered."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND

    assert CPU_ATTENTION_BACKEND in ATTENTION_BACKENDS
    assert CPU_ATTENTION_BACKEND in choices.ATTENTION_BACKEND_CHOICES


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sglang.srt.speculative.draft_parallel", "resolve_draft_parallel_layout"),
        ("sglang.srt.speculative.spec_utils", "draft_tp_context"),
        ("sglang.srt.speculative.spec_utils", "draft_pp_context"),
        ("sglang.srt.layers.moe.utils", "draft_model_build_scope"),
        ("sglang.srt.configs.draft_parallel", "DraftTPExecution.TARGET_LAYOUT"),
        ("sglang.srt.utils.hf_transformers_utils", "get_tokenizer"),
        ("sglang.srt.managers.tp_worker", "TpModelWorker"),
        ("sglang.srt.runtime_context", "get_parallel"),
        ("sglang.srt.arg_groups.model_override_base", "resolved_view"),
        ("sglang.srt.managers.multi_tokenizer_mixin", "get_main_process_id"),
        ("sglang.srt.managers.multi_tokenizer_mixin", "read_from_shared_memory"),
        ("sglang.srt.managers.io_struct", "ReleaseMemoryOccupationReqInput"),
        ("sglang.srt.managers.io_struct", "ReleaseMemoryOccupationReqOutput"),
        ("sglang.srt.managers.io_struct", "ResumeMemoryOccupationReqOutput"),
        ("sglang.srt.managers.io_struct", "UpdateWeightsFromTensorReqOutput"),
        ("sglang.srt.constants", "GPU_MEMORY_ALL_TYPES"),
        ("sglang.srt.environ", "envs.SGLANG_HTTP_SERVER_APP_PATH"),
    ],
)
def test_imported_name_exists(module, name):
    """Red if a name that is imported inside a function moves."""
    assert pkgutil.resolve_name(f"{module}:{name}") is not None
