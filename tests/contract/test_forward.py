"""Forward passes that we build ourselves."""

import dataclasses
import inspect

import pytest

pytestmark = pytest.mark.usefixtures("plugins")


def test_forward_batch_fields_we_fill_exist():
    """Red if a hand-built ForwardBatch no longer has these fields."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    names = {f.name for f in dataclasses.fields(ForwardBatch)}
    assert names >= {
        *("forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens"),
        *("seq_lens_cpu", "seq_lens_sum", "out_cache_loc", "positions"),
        *("spec_algorithm", "spec_info", "capture_hidden_mode", "extend_seq_lens"),
        *("extend_prefix_lens", "extend_start_loc", "extend_num_tokens"),
        *("extend_seq_lens_cpu", "extend_prefix_lens_cpu"),
        *("extend_logprob_start_lens_cpu", "global_num_token_non_padded_cpu"),
        "return_hidden_states_before_norm",
    }


@pytest.mark.contract_source
def test_logits_processor_honours_our_rows_in_the_verify_pass():
    """Red if `draft_extend_select_index` is dropped, or read in other modes only."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor

    names = {f.name for f in dataclasses.fields(LogitsMetadata)}
    assert "draft_extend_select_index" in names
    source = inspect.getsource(LogitsProcessor._get_pruned_states)
    branch = source[: source.index("sample_indices = None")]
    assert "is_target_verify()" in branch
    assert "hidden_states[draft_extend_select_index]" in branch


def test_spec_input_types_we_reuse_exist():
    """Red if the closed enum of spec inputs loses a value."""
    from sglang.srt.speculative.spec_info import SpecInputType

    assert {"NGRAM_VERIFY", "EAGLE_DRAFT"} <= set(SpecInputType.__members__)
