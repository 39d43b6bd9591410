"""What serving families of models needs of SGLang: checks by name, and tables."""

import importlib
import inspect
import json
import re
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.embedded import TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.model_checks import check_families
from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND
from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


def test_our_backend_is_triton_for_checks_of_models_alone():
    """Red if the answer stays in place behind the checks, or another backend is
    renamed."""
    from sglang.srt.arg_groups import model_hook

    from sglang_parse.cpu.ops import adjust_to_model

    before = model_hook.attention_backends_of
    view = SimpleNamespace(
        attention_backend=CPU_ATTENTION_BACKEND,
        prefill_attention_backend=None,
        decode_attention_backend="fa3",
    )
    asked = []
    adjust_to_model(lambda: asked.append(model_hook.attention_backends_of(view)))
    assert asked == [("triton", "fa3")]
    assert model_hook.attention_backends_of is before
    with pytest.raises(ZeroDivisionError):
        adjust_to_model(lambda: 1 / 0)
    assert model_hook.attention_backends_of is before


def test_latent_kv_is_handed_over_by_a_table_of_backend_names():
    """Red if models with latent KV choose otherwise: prefills on our backend would
    attend over expanded keys that no pool holds."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    from sglang_parse.cpu.attention import read_latent_kv

    registry = handler.AttentionBackendRegistry
    assert parameters(registry.register) == ["backend_name", "handler_func"]
    assert registry.get_handler("nobody's") is handler.handle_attention_triton
    kept = dict(registry._handlers)
    try:
        read_latent_kv()
        chosen = registry.get_handler(CPU_ATTENTION_BACKEND)(None, None)
        assert chosen == handler.AttnForwardMethod.MLA
    finally:
        registry._handlers.clear()
        registry._handlers.update(kept)


@pytest.mark.contract_source
def test_latent_attention_gives_our_backend_whole_queries_and_keys():
    """Red if it is told apart that our backend gets no rotary parts of its own."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    source = inspect.getsource(forward_mla)
    assert "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS" in source
    assert CPU_ATTENTION_BACKEND not in source


def test_experts_of_other_ranks_are_minus_one_in_torchs_code():
    """Red if other ranks' experts are told otherwise, or torch's code is another
    function: ours would not be asked (cpu/ops.py, `skip_others_experts`)."""
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.layers.quantization import unquant

    native = inspect.unwrap(fused_moe_native.moe_forward_native)
    assert parameters(native)[:3] == ["layer", "x", "topk_output"]
    source = inspect.getsource(unquant.UnquantizedFusedMoEMethod.forward_cpu)
    assert "fused_moe_native import moe_forward_native" in source
    chosen = torch.tensor([[2, 0], [1, -1]])
    mapping = torch.tensor([0, -1, 1])
    local = standard._map_topk_ids_to_local_experts(chosen, mapping)
    assert local.tolist() == [[1, 0], [-1, -1]]


@pytest.mark.parametrize(
    ("module", "config", "architecture"),
    [
        ("qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM"),
        ("qwen3_5", "Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
        ("qwen3_5", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
        ("kimi_linear", "KimiLinearConfig", "KimiLinearForCausalLM"),
        ("nemotron_h", "NemotronHConfig", "NemotronHForCausalLM"),
        ("falcon_h1", "FalconH1Config", "FalconH1ForCausalLM"),
        ("granitemoehybrid", "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
        ("lfm2", "Lfm2Config", "Lfm2ForCausalLM"),
        ("jet_nemotron", "JetNemotronConfig", "JetNemotronForCausalLM"),
        ("mamba2", "Mamba2Config", "Mamba2ForCausalLM"),
    ],
)
@pytest.mark.parametrize("flag", ["model_path", "speculative_draft_model_path"])
def test_models_with_a_recurrent_state_are_refused(
    tmp_path, flag, module, config, architecture
):
    """Red if a model that SGLang gives a pool of states is served as a target or a
    draft, or its refusal does not say what was found, what is expected and where it is
    described. The configurations are those of SGLang's own classes."""
    family = importlib.import_module(f"sglang.srt.configs.{module}")
    written = getattr(family, config)().to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(written))
    paths = {"model_path": TARGET_PATH, "speculative_draft_model_path": TARGET_PATH}
    args = SimpleNamespace(
        **{name: str(path) for name, path in (paths | {flag: tmp_path}).items()},
        **{"revision": None, "speculative_draft_model_revision": None},
    )
    told = f"--{flag.replace('_', '-')} '{tmp_path}': {architecture} keeps a recurrent "
    with pytest.raises(ValueError, match=re.escape(told)) as e:
        check_families(args, ParseConfig())
    assert "docs/not-served/recurrent-targets.md" in str(e.value)
    assert "; expected a model of a family that docs/models.md lists" in str(e.value)
    setattr(args, flag, str(TARGET_PATH))
    check_families(args, ParseConfig())


def test_every_configuration_with_states_belongs_to_a_family_that_is_refused():
    """Red if SGLang gives another kind of model a pool of states: its architecture has
    to be refused by name, or be unknown."""
    from sglang.srt.configs import hybrid_arch

    states = re.findall(r"^    (\w+Config),$", inspect.getsource(hybrid_arch), re.M)
    assert set(states) == {
        *("BailingHybridConfig", "FalconH1Config", "FalconMambaConfig"),
        *("GraniteMoeHybridConfig", "InklingMMConfig", "InklingModelConfig"),
        *("InternS2PreviewConfig", "JetNemotronConfig", "JetVLMConfig"),
        *("KimiLinearConfig", "Lfm2Config", "Lfm2MoeConfig", "Lfm2VlConfig"),
        *("Mamba2Config", "MambaConfig", "MiniCPMHybridConfig"),
        *("NemotronH_Nano_VL_V2_Config", "NemotronHConfig", "Qwen3NextConfig"),
        *("Qwen3_5Config", "Qwen3_5MoeConfig", "ZayaConfig"),
    }
