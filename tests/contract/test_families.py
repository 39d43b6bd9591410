"""What serving families of models needs of SGLang: checks by name, and tables."""

import inspect
from types import SimpleNamespace

import pytest

from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND
from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


def test_checks_of_models_ask_for_backends_through_the_name_that_we_answer_for():
    """Red if SGLang reads the backends elsewhere: gpt-oss would not start on a CPU
    (cpu/ops.py, `adjust_to_model`)."""
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


def test_latent_attention_gives_our_backend_whole_queries_and_keys():
    """Red if it is told apart that our backend gets no rotary parts of its own."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    source = inspect.getsource(forward_mla)
    assert "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS" in source
    assert CPU_ATTENTION_BACKEND not in source


def test_images_have_positions_of_their_own_in_prefills_alone():
    """Red if a token behind an image gets its position otherwise than by its number
    and a delta (runtime/batches.py), or a pass would read images again."""
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


def test_a_model_that_sglang_lacks_is_asked_for_by_its_own_name():
    """Red if `architectures` is another name once SGLang falls back to Hugging Face's
    code: the list of families would be asked for that one."""
    from sglang.srt.arg_groups.fields import model

    source = inspect.getsource(model)
    for value in ("auto", "sglang", "transformers", "mindspore"):
        assert f'"{value}"' in source
