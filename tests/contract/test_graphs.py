"""SGLang's graph runners are as sgl/graphs.py and sgl/compat expect them."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang

pytestmark = pytest.mark.usefixtures("plugins")


def runner_source(name: str = "") -> str:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
        PrefillCudaGraphRunner,
    )

    found = getattr(PrefillCudaGraphRunner, name) if name else PrefillCudaGraphRunner
    return inspect.getsource(found)


def test_a_forward_asks_the_runner_whether_it_takes_the_batch():
    """Red if a verify pass no longer reaches the prefill graphs, or asks otherwise."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = inspect.getsource(ModelRunner._forward_raw)
    assert "self.prefill_cuda_graph_runner.can_run_graph(forward_batch)" in forward
    assert "self.prefill_cuda_graph_runner.execute(" in forward
    assert "is_extend(include_draft_extend_v2=True)" in forward
    # Where decode graphs are there they would be asked first.
    assert "and self.decode_cuda_graph_runner\n" in forward
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        assert mode.is_extend(include_draft_extend_v2=True)


@pytest.mark.contract_source
def test_what_refuses_a_pass_is_what_we_ask_without():
    """Red if SGLang's own check has new arguments or reads the mode elsewhere
    (`replay_pass`)."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
        PrefillCudaGraphRunner,
    )

    source = runner_source("can_replay_locally")
    assert "if is_target_verify:\n            return False" in source
    assert "self.capture_hidden_mode < capture_hidden_mode" in source
    names = set(inspect.signature(PrefillCudaGraphRunner.can_replay_locally).parameters)
    assert names == {
        *("self", "batch_size", "num_tokens", "input_embeds", "replace_embeds"),
        *("prefix_lens", "is_target_verify", "capture_hidden_mode", "return_logprob"),
        *("lora_ineligible", "is_mixed", "batch_max_context_len"),
        "contains_mm_inputs",
    }
    # Below there is no other use of the mode in the way to a replay.
    for name in ("load_batch", "execute", "_execute_body_capture"):
        assert "is_target_verify" not in runner_source(name)


@pytest.mark.contract_source
def test_a_replay_copies_what_a_pass_sets():
    """Red if a replay needs further fields of the batch, or finds its buffers of
    lengths elsewhere."""
    load = runner_source("load_batch")
    copied = set(re.findall(r's\["(\w+)"\]\[:bs\]\.copy_\(forward_batch\.', load))
    assert copied == {
        *("seq_lens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc"),
        *("req_pool_indices", "orig_seq_lens"),
    }
    assert "if forward_batch.orig_seq_lens is not None:" in load
    assert "s = self._prefill_static_buffers" in load
    assert "forward_mode=pcg_forward_mode" in load  # as the batch's, verify included
    assert "spec_info=padded_spec_info" in load
    init = runner_source("__init__")
    assert "torch.zeros((self.max_bs,), dtype=torch.int64)" in init
    for flag in ("use_captured_attn_metadata", "enable_cp_bcg_capture", "is_multimodal",
                 "mamba_track_enabled", "enable_lora", "prefill_backend_name",
                 "_backend_can_run_prefill_cuda_graph"):  # fmt: skip
        assert re.search(rf"self\.{flag}\b.* = ", init), flag


@pytest.mark.contract_source
def test_attention_runs_outside_the_graph_and_sees_the_pass():
    """Red if captured attention would attend as a prefill, or reads the padding."""
    from sglang.srt.layers import radix_attention

    source = inspect.getsource(radix_attention.RadixAttention._eager_attention)
    assert "@eager_on_graph" in source
    assert "forward_batch = get_forward_batch()" in source
    assert "n = forward_batch.global_num_token_non_padded_cpu" in source
    body = runner_source("_execute_body_capture")
    assert "self.model_runner.model.forward(" in body  # logits are computed behind it


@pytest.mark.contract_source
def test_hidden_states_are_captured_by_the_servers_setting():
    """Red if a runner takes the mode from elsewhere: passes would be refused
    (`capture_hidden_states`)."""
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.runner import base_runner, decode_cuda_graph_runner

    mode = inspect.getsource(forward_batch_info.get_server_return_hidden_states_mode)
    assert "get_exec().features" in mode and '== "full"' in mode
    base = inspect.getsource(base_runner.BaseRunner.__init__)
    assert "else get_server_return_hidden_states_mode()" in base
    decode = inspect.getsource(decode_cuda_graph_runner.DecodeCudaGraphRunner.__init__)
    for source in (decode, runner_source("__init__")):
        assert "self.capture_hidden_mode = self.return_hidden_states_mode" in source
    output = inspect.getsource(decode_cuda_graph_runner.DecodeCudaGraphRunner.execute)
    assert "last_hidden_states=" in output


@pytest.mark.contract_source
def test_a_logits_buffer_of_another_size_is_left_alone():
    """Red if the LM head of a pass writes its verdict rows over the requests'."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    source = inspect.getsource(LogitsProcessor._compute_lm_head)
    assert re.search(r"if out is not None and out\.shape != \(\s*hidden_states", source)
    source = inspect.getsource(LogitsProcessor._copy_logits_to_buffer)
    assert "tuple(logits_buffer.shape) == tuple(" in source


def test_a_heads_prefills_are_captured_with_the_targets_states():
    """Red if SGLang captures prefills of its own EAGLE-3 heads in another way, or a
    replay takes their input from elsewhere than the batch's spec input
    (`capture_head_prefills`)."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.speculative.eagle_utils import (
        get_draft_input_from_target_hidden_dim,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    init = inspect.getsource(ModelRunner.init_prefill_cuda_graph)
    assert "force_for_draft_worker=force_for_draft_worker" in init
    capture = inspect.getsource(cuda_graph_setup.capture_prefill_graph)
    skip = "if model_runner.is_draft_worker and not force_for_draft_worker:"
    assert skip in capture
    assert "check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED)" in capture
    source = runner_source("__init__")
    assert "is_eagle = model_runner.spec_algorithm.is_eagle()" in source
    assert "self.capture_hidden_mode = CaptureHiddenMode.LAST" in source
    assert "get_draft_input_from_target_hidden_dim(model_runner)" in source
    load = runner_source("load_batch")
    assert "forward_batch.spec_info.hidden_states" in load
    assert "padded_spec_info = dataclasses.replace(" in load
    config = SimpleNamespace(target_hidden_size=8, num_aux_hidden_states=3)
    runner = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.EAGLE3,
        model_config=SimpleNamespace(
            hf_config=config, hidden_size=5, spec_hidden_size=5
        ),
    )
    assert get_draft_input_from_target_hidden_dim(runner) == 24
    runner.spec_algorithm = SpeculativeAlgorithm.EAGLE
    runner.model_config.hf_config = SimpleNamespace()
    assert get_draft_input_from_target_hidden_dim(runner) == 5


def test_a_heads_steps_are_captured_with_our_input():
    """Red if a decode graph asks elsewhere for what a step reads beside tokens, or its
    hidden states are not captured (`capture_head_steps`)."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        get_required_capture_hidden_mode,
    )
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )

    prepare = inspect.getsource(DecodeCudaGraphRunner.capture_prepare)
    assert "spec_info = self.get_spec_info(num_tokens)" in prepare
    assert "get_required_capture_hidden_mode(" in prepare
    assert "spec_info=spec_info" in prepare
    wanted = SimpleNamespace(capture_hidden_mode=CaptureHiddenMode.LAST)
    found = get_required_capture_hidden_mode(CaptureHiddenMode.NULL, wanted)
    assert found == CaptureHiddenMode.LAST
    init = inspect.getsource(DecodeCudaGraphRunner.__init__)
    assert "if model_runner.spec_algorithm.is_speculative():" in init
    assert init.index("self.max_num_token =") < init.index("self.capture()")
    assert "DecodeCudaGraphRunner" in inspect.getsource(
        ModelRunner._decode_cuda_graph_runner_cls
    )
    decode = inspect.getsource(ModelRunner.init_decode_cuda_graph)
    assert "capture_decode_graph(model_runner=self)" in decode
    capture = inspect.getsource(cuda_graph_setup.capture_decode_graph)
    assert "Phase.DECODE, Backend.DISABLED" in capture


@pytest.mark.contract_source
def test_a_captured_step_is_planned_from_the_requests_row():
    """Red if FlashInfer reads a draft's columns from its spec input although that has
    none, or Triton has come to read them from the row too."""
    root = Path(sglang.__file__).parent / "srt/layers/attention"
    flashinfer = (root / "flashinfer_backend.py").read_text(encoding="utf-8")
    assert 'spec_info is None or getattr(spec_info, "kv_indptr", None) is None' in (
        flashinfer
    )
    triton = (root / "triton_backend.py").read_text(encoding="utf-8")
    assert "if forward_mode.is_decode_or_idle() and spec_info is not None:" in triton


@pytest.mark.contract_source
def test_plans_of_captured_steps_are_staged_in_page_locked_memory():
    """Red if FlashInfer stages them elsewhere, or copies them at once: then
    `plan_buffers_in_turn` changes nothing."""
    import flashinfer

    root = Path(flashinfer.__file__).parent
    decode = (root / "decode.py").read_text(encoding="utf-8")
    fast = decode[decode.index("def fast_decode_plan(") :]
    assert fast.count("self._pin_memory_int_workspace_buffer,") >= 2
    scheduler = root / "data/include/flashinfer/attention/scheduler.cuh"
    copies = scheduler.read_text(encoding="utf-8")
    assert "cudaMemcpyAsync(int_buffer, page_locked_int_buffer" in copies
    backend = Path(sglang.__file__).parent / "srt/layers/attention"
    source = (backend / "flashinfer_backend.py").read_text(encoding="utf-8")
    assert "w.begin_forward = partial(fast_decode_plan, w)" in source
    assert "for w in self.decode_cuda_graph_metadata[bs]:" in source


@pytest.mark.contract_source
def test_a_runner_without_graphs_holds_its_eager_runner_and_no_prefills():
    """Red if SGLang marks a runner without graphs otherwise than sgl/compat does
    where a head's capture fails."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    forward = inspect.getsource(ModelRunner._forward_raw)
    assert "and self.prefill_cuda_graph_runner is not None" in forward
    recapture = inspect.getsource(ModelRunner)
    assert "self.decode_cuda_graph_runner is self.eager_runner" in recapture
    assert "self.eager_runner = capture.eager_runner" in recapture


@pytest.mark.contract_source
def test_captured_decode_steps_say_how_long_they_may_be():
    """Red if short passes are never decode steps any more, or ones that are not
    captured (verify/short_passes.py)."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    init = inspect.getsource(DecodeCudaGraphRunner.__init__)
    assert "self.max_bs = max(self.capture_bs)" in init
    assert "self.disable_padding = " in init
    assert "self.capture_hidden_mode" in init
    assert "cuda_graph_bs <= self.max_bs" in inspect.getsource(
        DecodeCudaGraphRunner.can_run_graph
    )
    assert not re.search(r"self\.max_bs\b", inspect.getsource(EagerRunner))


@pytest.mark.contract_source
@pytest.mark.parametrize(
    ("module", "attends"),
    [
        ("flashinfer_backend", "decode_wrapper.forward("),
        ("triton_backend", "self.decode_attention_fwd("),
        ("flashattention_backend", "flash_attn_with_kvcache("),
    ],
)
def test_a_decode_step_writes_the_kv_of_all_rows_before_it_attends(module, attends):
    """Red if a row of a short pass may attend before the rows in front of it are
    written (verify/short_passes.py)."""
    folder = Path(sglang.__file__).parent / "srt" / "layers" / "attention"
    text = (folder / f"{module}.py").read_text(encoding="utf-8")  # some need a GPU
    steps = text.split("    def forward_decode(")[1:]
    assert steps
    for step in steps:
        source = step.split("\n    def ")[0]
        assert 0 < source.index("set_kv_buffer(") < source.index(attends)
