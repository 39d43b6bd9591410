"""What we build on in SGLang's source, as text: `make contract` reads it on an upgrade.

A row names a file below sglang/srt, or an object of one as "file:Class.method", and
pieces of text that must stand there.
"""

import inspect
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang

pytestmark = pytest.mark.usefixtures("plugins")

ROOT = Path(sglang.__file__).parent / "srt"
RUNNER, RUNNERS = "model_executor/model_runner.py:ModelRunner", "model_executor/runner/"
PREFILLS = f"{RUNNERS}prefill_cuda_graph_runner.py:PrefillCudaGraphRunner"
STEPS = f"{RUNNERS}decode_cuda_graph_runner.py:DecodeCudaGraphRunner"
SETUP = "model_executor/model_runner_components/"
BATCH = "model_executor/forward_batch_info.py:ForwardBatch"
ATTENTION, LOGITS = "layers/attention/", "layers/logits_processor.py:LogitsProcessor"
SCHEDULER = "managers/scheduler.py:Scheduler"
TOKENIZER = "managers/tokenizer_manager.py:TokenizerManager"

#: What would break -> where it is decided, and the text.
NEEDS = {
    "a verify pass reaches the prefill graphs": {
        f"{RUNNER}._forward_raw": (
            "self.prefill_cuda_graph_runner.can_run_graph(forward_batch)",
            "self.prefill_cuda_graph_runner.execute(",
            "is_extend(include_draft_extend_v2=True)",
            "and self.decode_cuda_graph_runner\n",  # they would be asked first
        ),
    },
    "SGLang refuses a pass for its mode alone (graphs_of_pass)": {
        f"{PREFILLS}.can_replay_locally": (
            "if is_target_verify:\n            return False",
            "self.capture_hidden_mode < capture_hidden_mode",
        ),
    },
    "a replay copies what a pass sets": {
        f"{PREFILLS}.load_batch": (
            "if forward_batch.orig_seq_lens is not None:",
            "s = self._prefill_static_buffers",
            "forward_mode=pcg_forward_mode",  # as the batch's, verify included
            "spec_info=padded_spec_info",
        ),
        f"{PREFILLS}.__init__": ("torch.zeros((self.max_bs,), dtype=torch.int64)",),
    },
    "attention runs outside the graph and sees the pass": {
        "layers/radix_attention.py:RadixAttention._eager_attention": (
            "@eager_on_graph",
            "forward_batch = get_forward_batch()",
            "n = forward_batch.global_num_token_non_padded_cpu",
        ),
        f"{PREFILLS}._execute_body_capture": ("self.model_runner.model.forward(",),
    },
    "hidden states are captured by the server's setting (plan_plain_decode)": {
        "model_executor/forward_batch_info.py:get_server_return_hidden_states_mode": (
            "get_exec().features",
            '== "full"',
        ),
        f"{RUNNERS}base_runner.py:BaseRunner.__init__": (
            "else get_server_return_hidden_states_mode()",
        ),
        f"{STEPS}.__init__": ("capture_hidden_mode = self.return_hidden_states_mode",),
        f"{PREFILLS}.__init__": (
            "capture_hidden_mode = self.return_hidden_states_mode",
        ),
        f"{STEPS}.execute": ("last_hidden_states=",),
    },
    "the LM head of a pass leaves the requests' buffer of logits alone": {
        f"{LOGITS}._compute_lm_head": ("if out is not None and out.shape != (",),
        f"{LOGITS}._copy_logits_to_buffer": ("tuple(logits_buffer.shape) == tuple(",),
    },
    "a head's prefills read the target's states (captured_for_head)": {
        f"{RUNNER}.init_prefill_cuda_graph": (
            "force_for_draft_worker=force_for_draft_worker",
        ),
        f"{SETUP}cuda_graph_setup.py:capture_prefill_graph": (
            "if model_runner.is_draft_worker and not force_for_draft_worker:",
            "check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED)",
        ),
        f"{PREFILLS}.__init__": (
            "is_eagle = model_runner.spec_algorithm.is_eagle()",
            "self.capture_hidden_mode = CaptureHiddenMode.LAST",
            "get_draft_input_from_target_hidden_dim(model_runner)",
        ),
        f"{PREFILLS}.load_batch": (
            "forward_batch.spec_info.hidden_states",
            "padded_spec_info = dataclasses.replace(",
        ),
    },
    "a head's steps are captured with our input (captured_for_head)": {
        f"{STEPS}.capture_prepare": (
            "spec_info = self.get_spec_info(num_tokens)",
            "get_required_capture_hidden_mode(",
            "spec_info=spec_info",
        ),
        f"{STEPS}.__init__": (
            "if model_runner.spec_algorithm.is_speculative():",
            "self.max_num_token =",
            "self.capture()",
        ),
        f"{RUNNER}._decode_cuda_graph_runner_cls": ("DecodeCudaGraphRunner",),
        f"{RUNNER}.init_decode_cuda_graph": (
            "capture_decode_graph(model_runner=self)",
        ),
        f"{SETUP}cuda_graph_setup.py:capture_decode_graph": (
            "Phase.DECODE, Backend.DISABLED",
        ),
    },
    "a draft's steps are captured with their states (shown_by_steps)": {
        f"{STEPS}.capture_prepare": (
            "spec_info = self.get_spec_info(num_tokens)",
            "self.capture_hidden_mode = get_required_capture_hidden_mode(",
            "capture_hidden_mode=self.capture_hidden_mode",
        ),
        f"{STEPS}._validate_capture_hidden_mode": (
            "if self.capture_hidden_mode < forward_batch.capture_hidden_mode:",
        ),
    },
    "a captured step is planned from the request's row": {
        f"{ATTENTION}flashinfer_backend.py": (
            'spec_info is None or getattr(spec_info, "kv_indptr", None) is None',
        ),
        f"{ATTENTION}triton_backend.py": (
            "if forward_mode.is_decode_or_idle() and spec_info is not None:",
        ),
    },
    "a runner without graphs has its eager runner, and no prefills": {
        f"{RUNNER}._forward_raw": ("and self.prefill_cuda_graph_runner is not None",),
        RUNNER: (
            "self.decode_cuda_graph_runner is self.eager_runner",
            "self.eager_runner = capture.eager_runner",
        ),
    },
    "captured steps say how long they may be (verify/short_passes.py)": {
        f"{STEPS}.__init__": (
            "self.max_bs = max(self.capture_bs)",
            "self.disable_padding = ",
            "self.capture_hidden_mode",
        ),
        f"{STEPS}.can_run_graph": ("cuda_graph_bs <= self.max_bs",),
    },
    "models are checked by the backends that we answer for (taken_for_triton)": {
        "arg_groups/model_hook.py:handle_model_specific_adjustments": (
            "= attention_backends_of(",
            "prefill_attn_backend in supported_backends",
            '"triton",',
        ),
    },
    "a token behind an image has its number and a delta as its position": {
        f"{BATCH}._compute_mrope_positions_decode": (
            "mm.mrope_position_delta.item() if mm is not None else 0",
        ),
        "managers/mm_utils.py:prepare_mm_inputs": (
            "not forward_batch.forward_mode.is_target_verify()",
            "forward_batch.contains_mm_inputs()",
        ),
        "managers/schedule_batch.py:Req.__init__": (
            "self.multimodal_inputs: Optional",
        ),
    },
    "rows of experts are counted on the device (count_tokens)": {
        f"{BATCH}._init_num_token_non_padded": (
            "if enable_num_token_non_padded():",
            "self.global_num_token_non_padded = torch.tensor(",
            "dtype=torch.int32",
        ),
    },
    "a model that SGLang lacks is asked for by its own name": {
        "arg_groups/fields/model.py": (
            '"auto"',
            '"sglang"',
            '"transformers"',
            '"mindspore"',
        ),
    },
    "logits are bounded in place by the function that we replace": {
        f"{LOGITS}._get_logits": (
            "  fused_softcap(logits, self.final_logit_softcapping)\n",
        ),
    },
    "the lengths of a request's slots are in its KV record (sgl/slots.py)": {
        "managers/schedule_batch.py": (
            "kv_allocated_len: int = 0",
            "kv_committed_len: int = 0",
        ),
    },
    "a row is wide enough for twice the scheduler's reserve": {
        "mem_cache/allocation_sizing.py": (
            "return 2 * get_alloc_len_per_decode()",
            "4 + (max_speculative_num_draft_tokens() or 0)",
        ),
    },
    "the draft's pool is in the memory budget": {
        "model_executor/pool_configurator.py:DefaultPoolConfigurator": (
            "self._compute_cell_size(",
        ),
    },
    "routed experts have rows for a prefill (capacity.longest_pass)": {
        "state_capturer/routed_experts.py:RoutedExpertsCapturer": (
            "max_batch_size = max(",
            "get_schedule().chunked_prefill_size",
        ),
    },
    "FlashInfer asks the spec input for ragged arrays": {
        f"{ATTENTION}flashinfer_backend.py": (".generate_attn_arg_prefill(",),
    },
    "the memory saver keeps the draft's weights aside": {
        f"{SETUP}load_model_utils.py": (
            "is_draft_worker and get_exec().features.enable_draft_weights_cpu",
        ),
    },
    "forwards look for graphs and their states where we take them (graphs_of_pass)": {
        f"{RUNNER}._forward_raw": (
            "self.decode_cuda_graph_runner",
            "self.prefill_cuda_graph_runner",
        ),
        f"{STEPS}._validate_capture_hidden_mode": (
            "self.capture_hidden_mode < forward_batch.capture_hidden_mode",
        ),
    },
    "FlashInfer has words under the names of two backends (_part_of_two)": {
        f"{ATTENTION}flashinfer_backend.py": (
            "self.prefill_backend = ",
            "self.decode_backend = ",
            "backend=self.prefill_backend,",
        ),
        f"{ATTENTION}hybrid_attn_backend.py": (
            "self.prefill_backend = prefill_backend",
            "self.decode_backend = decode_backend",
        ),
    },
    "models of heads wait for a GPU (on_device)": {
        f"models/{name}.py": ("torch.cuda.synchronize()",)
        for name in ("deepseek_v2", "glm4_moe")
    },
    "what comes for a scheduler waits in a ZeroMQ socket": {
        "managers/scheduler.py": (
            "self.recv_from_tokenizer = self.ipc_channels.recv_from_tokenizer",
        ),
        "managers/scheduler_components/ipc_channels.py": (
            "recv_from_tokenizer = get_zmq_socket(",
        ),
        "managers/scheduler_components/request_receiver.py": (
            "sock_recv(self.recv_from_tokenizer, zmq.NOBLOCK)",
        ),
    },
    "accept figures are made of what we correct (count_in_log)": {
        f"{TOKENIZER}._calculate_spec_decoding_metrics": (
            "spec_num_proposed_drafts",
            "spec_accept_rate",
            "spec_num_cap_tokens",
        ),
        "managers/scheduler_components/metrics_reporter.py": (
            "self.forward_ct_decode % self.decode_log_interval != 0",
            "num_correct_drafts = self.spec_num_correct_drafts",
            "self.spec_num_forward_ct * draft_per_round",
            "self.spec_num_cap_tokens = 0",
        ),
    },
    "a warm-up sends an image where images are said to be read (hide_media)": {
        "entrypoints/http_server.py:_execute_server_warmup": (
            'model_info.get("has_image_understanding", False)',
        ),
        f"{TOKENIZER}.init_model_config": ("self.model_config = ",),
    },
    "processes that serve HTTP import the application by name (http_workers)": {
        "entrypoints/http_server.py:_setup_and_run_http_server": (
            "app_path = envs.SGLANG_HTTP_SERVER_APP_PATH.get()",
            "uvicorn.run(app_path, **uvicorn_options)",
        ),
        "entrypoints/http_server.py:init_multi_tokenizer": (
            'f"multi_tokenizer_args_{main_pid}"',
        ),
    },
    "a hook that does not apply is logged and swallowed (check_hooks)": {
        "plugins/hook_registry.py:HookRegistry.apply_hooks": (
            "except Exception",
            "_patched.add",
        ),
    },
    "tokens of these fields end an answer (requests/state.py)": {
        "managers/schedule_batch.py:Req._check_token_based_finish": (
            *("ignore_eos", "stop_token_ids", "additional_stop_token_ids"),
            *("eos_token_ids", "eos_token_id"),
        ),
    },
    "a worker is made with these keywords, and rounds see who waits": {
        SCHEDULER: (
            *("server_args=", "gpu_id=", "nccl_port=", "target_worker="),
            "self.waiting_queue",
        ),
    },
}


def source_of(where: str) -> str:
    """The text of a file, as some import on a GPU only, or of an object in it."""
    file, _, name = where.partition(":")
    if not name:
        return (ROOT / file).read_text(encoding="utf-8")
    module = "sglang.srt." + file.removesuffix(".py").replace("/", ".")
    found = inspect.unwrap(pkgutil.resolve_name(f"{module}:{name}"))
    return inspect.getsource(found)


@pytest.mark.contract_source
@pytest.mark.parametrize("need", NEEDS)
def test_sglang_does_what_we_build_on(need):
    """Red if SGLang decides it elsewhere or otherwise."""
    for where, texts in NEEDS[need].items():
        source = source_of(where)
        for text in texts:
            assert text in source, (where, text)


@pytest.mark.contract_source
def test_a_replay_copies_no_more_than_a_pass_sets():
    """Red if a replay needs further fields of the batch, asks further questions, or
    reads the mode where it is in the way."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
        PrefillCudaGraphRunner,
    )

    load = source_of(f"{PREFILLS}.load_batch")
    copied = set(re.findall(r's\["(\w+)"\]\[:bs\]\.copy_\(forward_batch\.', load))
    assert copied == {
        *("seq_lens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc"),
        *("req_pool_indices", "orig_seq_lens"),
    }
    names = set(inspect.signature(PrefillCudaGraphRunner.can_replay_locally).parameters)
    assert names == {
        *("self", "batch_size", "num_tokens", "input_embeds", "replace_embeds"),
        *("prefix_lens", "is_target_verify", "capture_hidden_mode", "return_logprob"),
        *("lora_ineligible", "is_mixed", "batch_max_context_len"),
        "contains_mm_inputs",
    }
    for name in ("load_batch", "execute", "_execute_body_capture"):
        assert "is_target_verify" not in source_of(f"{PREFILLS}.{name}")
    for flag in ("use_captured_attn_metadata", "enable_cp_bcg_capture", "is_multimodal",
                 "enable_lora", "prefill_backend_name",
                 "_backend_can_run_prefill_cuda_graph"):  # fmt: skip
        assert re.search(rf"self\.{flag}\b.* = ", source_of(f"{PREFILLS}.__init__"))


def test_the_width_of_a_heads_prefill_is_that_of_its_features():
    """Red if SGLang counts the features of a head's prefill otherwise, or a step of a
    head captures no hidden states."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        get_required_capture_hidden_mode,
    )
    from sglang.srt.speculative.eagle_utils import (
        get_draft_input_from_target_hidden_dim,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    model = SimpleNamespace(
        hf_config=SimpleNamespace(target_hidden_size=8, num_aux_hidden_states=3),
        hidden_size=5,
        spec_hidden_size=5,
    )
    runner = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.EAGLE3, model_config=model
    )
    assert get_draft_input_from_target_hidden_dim(runner) == 24
    runner.spec_algorithm = SpeculativeAlgorithm.EAGLE
    model.hf_config = SimpleNamespace()
    assert get_draft_input_from_target_hidden_dim(runner) == 5
    wanted = SimpleNamespace(capture_hidden_mode=CaptureHiddenMode.LAST)
    found = get_required_capture_hidden_mode(CaptureHiddenMode.NULL, wanted)
    assert found == CaptureHiddenMode.LAST


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
    source = source_of(f"{ATTENTION}flashinfer_backend.py")
    assert "w.begin_forward = partial(fast_decode_plan, w)" in source
    assert "for w in self.decode_cuda_graph_metadata[bs]:" in source


@pytest.mark.contract_source
@pytest.mark.parametrize(
    ("file", "attends"),
    [
        ("flashinfer_backend.py", "decode_wrapper.forward("),
        ("triton_backend.py", "self.decode_attention_fwd("),
        ("flashattention_backend.py", "flash_attn_with_kvcache("),
    ],
)
def test_a_decode_step_writes_the_kv_of_all_rows_before_it_attends(file, attends):
    """Red if a row of a short pass may attend before the rows in front of it are
    written (verify/short_passes.py)."""
    steps = source_of(ATTENTION + file).split("    def forward_decode(")[1:]
    assert steps
    for step in steps:
        source = step.split("\n    def ")[0]
        assert 0 < source.index("set_kv_buffer(") < source.index(attends)
