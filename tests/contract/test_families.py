"""What serving families of models needs of SGLang: checks by name, and tables."""

import inspect
import types
from types import SimpleNamespace

import pytest
import torch

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


def test_torch_stands_in_for_kernels_with_their_arguments():
    """Red if a kernel around gated delta nets takes other arguments than ours."""
    from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    from sglang_parse.recurrent import gated_ops

    for theirs, ours in (
        (projections.fused_qkvzba_split_reshape_cat, gated_ops.split_by_group),
        (
            projections.fused_qkvzba_split_reshape_cat_contiguous,
            gated_ops.split_by_kind,
        ),
        (fused_norm_gate.rms_norm_gated, gated_ops.norm_and_gate),
        (layernorm_gated.rms_norm_gated, gated_ops.norm_or_gate),
        (elementwise.fused_sigmoid_mul, gated_ops.multiply_by_sigmoid),
        (elementwise.fused_gate_sigmoid_mul_add, gated_ops.add_gated),
    ):
        assert parameters(inspect.unwrap(theirs)) == parameters(ours)


def test_models_with_gated_delta_nets_ask_torch_for_a_device(monkeypatch):
    """Red if they no longer do: that of `on_device` could go. Or if models are built
    elsewhere: Qwen3-Next would not start on a torch that was built for CUDA."""
    from sglang.srt.model_loader import loader

    from sglang_parse.cpu import ops

    memory = types.SimpleNamespace(enable_hierarchical_cache=False)
    monkeypatch.setattr(ops, "get_memory", lambda: memory)
    assert "model_class(" in inspect.getsource(inspect.unwrap(loader._initialize_model))
    file = inspect.getfile(loader).replace("model_loader/loader", "models/qwen3_next")
    with open(file, encoding="utf-8") as source:
        assert "torch.get_device_module().current_device()" in source.read()
    before = torch.get_device_module
    found = ops.build_on_cpu(lambda: torch.get_device_module().current_device())
    assert torch.device(found) == torch.device("cpu")
    assert torch.get_device_module is before
