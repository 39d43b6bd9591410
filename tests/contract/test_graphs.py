"""SGLang's graph runners are as runtime/graphs.py and compat.py expect them."""

import inspect
import re

import pytest

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


def test_what_refuses_a_pass_is_what_we_ask_without():
    """Red if SGLang's own check has new arguments or reads the mode elsewhere."""
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


def test_attention_runs_outside_the_graph_and_sees_the_pass():
    """Red if captured attention would attend as a prefill, or reads the padding."""
    from sglang.srt.layers import radix_attention

    source = inspect.getsource(radix_attention.RadixAttention._eager_attention)
    assert "@eager_on_graph" in source
    assert "forward_batch = get_forward_batch()" in source
    assert "n = forward_batch.global_num_token_non_padded_cpu" in source
    body = runner_source("_execute_body_capture")
    assert "self.model_runner.model.forward(" in body  # logits are computed behind it


def test_hidden_states_are_captured_by_the_servers_setting():
    """Red if a runner takes the mode from elsewhere: passes would be refused."""
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


def test_a_logits_buffer_of_another_size_is_left_alone():
    """Red if the LM head of a pass writes its verdict rows over the requests'."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    source = inspect.getsource(LogitsProcessor._compute_lm_head)
    assert re.search(r"if out is not None and out\.shape != \(\s*hidden_states", source)
    source = inspect.getsource(LogitsProcessor._copy_logits_to_buffer)
    assert "tuple(logits_buffer.shape) == tuple(" in source
