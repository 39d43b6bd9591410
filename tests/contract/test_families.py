"""What serving families of models needs of SGLang: checks by name, and tables."""

import inspect
import types
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND
from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.contract_source
def test_checks_of_models_ask_for_backends_through_the_name_that_we_answer_for():
    """Red if SGLang reads the backends elsewhere: gpt-oss would not start on a CPU
    (`taken_for_triton`)."""
    from sglang.srt.arg_groups import model_hook

    checks = inspect.unwrap(model_hook.handle_model_specific_adjustments)
    assert parameters(checks) == ["server_args"]
    source = inspect.getsource(checks)
    assert "= attention_backends_of(" in source
    assert "prefill_attn_backend in supported_backends" in source
    assert source.count('"triton",') >= 2


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


@pytest.mark.contract_source
def test_images_have_positions_of_their_own_in_prefills_alone():
    """Red if a token behind an image gets its position otherwise than by its number
    and a delta (sgl/forward_batches.py), or a pass would read images again."""
    from sglang.srt.managers.mm_utils import prepare_mm_inputs
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    step = inspect.getsource(ForwardBatch._compute_mrope_positions_decode)
    assert "mm.mrope_position_delta.item() if mm is not None else 0" in step
    embed = inspect.getsource(prepare_mm_inputs)
    assert "not forward_batch.forward_mode.is_target_verify()" in embed
    assert "forward_batch.contains_mm_inputs()" in embed
    batch = ForwardBatch.__dataclass_fields__
    assert batch["mm_inputs"].default is None
    assert batch["mrope_positions"].default is None
    assert "self.multimodal_inputs: Optional" in inspect.getsource(Req.__init__)


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


@pytest.mark.contract_source
def test_rows_of_experts_are_counted_on_the_device():
    """Red if layers of experts on several ranks read the count elsewhere, or in
    another shape (sgl/forward_batches.py, `count_tokens`)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    source = inspect.getsource(ForwardBatch._init_num_token_non_padded)
    assert "if enable_num_token_non_padded():" in source
    assert "self.global_num_token_non_padded = torch.tensor(" in source
    assert "dtype=torch.int32" in source


@pytest.mark.contract_source
def test_a_model_that_sglang_lacks_is_asked_for_by_its_own_name():
    """Red if `architectures` is another name once SGLang falls back to Hugging Face's
    code: the list of families would be asked for that one."""
    from sglang.srt.arg_groups.fields import model

    source = inspect.getsource(model)
    for value in ("auto", "sglang", "transformers", "mindspore"):
        assert f'"{value}"' in source


@pytest.mark.contract_source
def test_linear_layers_get_their_backend_from_one_function():
    """Red if the backend of gated delta nets is made elsewhere, or layers hand it other
    arguments: ours would not be asked (recurrent/gated_backend.py)."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
        HybridLinearAttnBackend,
    )
    from sglang.srt.model_executor.model_runner_components import (
        attention_backend_setup,
    )

    wrap = inspect.unwrap(attention_registry.attn_backend_wrapper)
    assert parameters(wrap) == ["runner", "full_attn_backend"]
    assert "attn_backend_wrapper(" in inspect.getsource(attention_backend_setup)
    for method in ("forward_extend", "forward_decode"):
        source = inspect.getsource(getattr(HybridLinearAttnBackend, method))
        assert f"self.linear_attn_backend.{method}(" in source
        for name in ("layer", "mixed_qkv", "a", "b"):
            assert f"{name}={name}," in source


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


@pytest.mark.contract_source
def test_states_lie_by_layer_and_slot():
    """Red if SGLang's pool of states has another order: rows are bounded by it, and
    the backend reads and writes it (runtime/capacity, recurrent/gated_backend)."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

    source = inspect.getsource(MambaPool.__init__)
    assert "size=(num_mamba_layers, size + 1) + conv_shape" in source
    assert "size=(num_mamba_layers, size + 1) + temporal_state_shape" in source
    assert parameters(HybridReqToTokenPool.get_mamba_indices) == ["self", "req_indices"]
    assert parameters(HybridReqToTokenPool.mamba2_layer_cache) == ["self", "layer_id"]


@pytest.mark.contract_source
def test_a_state_is_cached_only_at_the_last_kv():
    """Red if SGLang caches the state of an answer that ended inside a round under the
    shorter text, or a verify pass clears states."""
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.model_executor.model_runner import ModelRunner

    processor = batch_result_processor.SchedulerBatchResultProcessor
    can_cache = inspect.getsource(processor._mamba_can_cache_finished_req)
    assert "if req.owned_kv_len() != req.kv.kv_committed_len:" in can_cache
    clear = inspect.getsource(ModelRunner._maybe_execute_deferred_mamba_cow_and_clear)
    assert "forward_batch.forward_mode.is_target_verify()" in clear


def test_models_with_gated_delta_nets_ask_torch_for_a_device(monkeypatch):
    """Red if they no longer do: `built_on_cpu` could go. Or if models are built
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


@pytest.mark.contract_source
def test_logits_are_bounded_in_place_by_the_function_that_we_replace():
    """Red if SGLang bounds Gemma 2's logits elsewhere, or reads what it returns: on a
    CPU that is a Triton kernel (cpu/ops.py, `softcap`)."""
    from sglang.kernels.ops.activation import softcap
    from sglang.srt.layers import logits_processor

    assert logits_processor.fused_softcap.__name__ == "softcap_inplace_logits"
    assert parameters(softcap.softcap_inplace_logits) == [
        *("full_logits", "final_logit_softcapping")
    ]
    source = inspect.getsource(logits_processor.LogitsProcessor._get_logits)
    assert "  fused_softcap(logits, self.final_logit_softcapping)\n" in source
