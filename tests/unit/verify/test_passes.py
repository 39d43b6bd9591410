"""What the verify pass hands to attention backends and to the logits processor."""

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_parse.verify.backends.mask import MaskedVerifyInput
from sglang_parse.verify.backends.verify_backend import place_slots, running_offsets
from sglang_parse.verify.passes import TargetVerifier, select_logits_rows
from tests.support.passes import plan_of, random_request
from tests.support.reference import verify_mask


def test_running_offsets_start_at_zero():
    """Red if the indptr arrays lose their first entry or their int32 type."""
    offsets = running_offsets((3, 0, 4), "cpu")
    assert offsets.tolist() == [0, 3, 3, 7]
    assert offsets.dtype == torch.int32


def check_slots(seed: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(4)]
    plan = plan_of(requests)
    width = 64
    slots = list(range(1, 1 + 8 * width))
    rng.shuffle(slots)
    table = torch.tensor(slots, dtype=torch.int32).view(8, width)
    rows = rng.sample(range(8), len(requests))
    scratch = torch.arange(5000, 5000 + plan.num_suffix_tokens)
    kv_index, written = place_slots(plan, rows=rows, scratch=scratch, table=table)

    free = iter(scratch.tolist())
    expected = []
    expected_written = []
    for row, (seq_len, num_draft, cuts, suffix_len) in zip(rows, requests, strict=True):
        num_columns = seq_len + 1 + num_draft
        own = [int(table[row, c]) for c in range(num_columns)]
        own += [next(free) for _ in range(len(cuts) * suffix_len)]
        expected.append(own)
        expected_written += own[seq_len:]
    assert [k.tolist() for k in kv_index] == expected
    assert written.tolist() == expected_written

    info = MaskedVerifyInput(plan, kv_index, torch.tensor([0]))
    indices, kv_indptr, qo_indptr, mask = info.generate_attn_arg_prefill(
        req_pool_indices=torch.tensor(rows),
        paged_kernel_lens=None,
        paged_kernel_lens_sum=None,
    )
    assert indices.tolist() == [s for own in expected for s in own]
    assert indices.dtype == kv_indptr.dtype == qo_indptr.dtype == torch.int32
    assert kv_indptr.tolist()[-1] == sum(plan.kv_lens)
    assert kv_indptr.tolist()[:-1] == [
        sum(plan.kv_lens[:i]) for i in range(len(requests))
    ]
    assert qo_indptr.tolist()[:-1] == list(plan.root_rows)
    assert mask.tolist() == [
        cell for r in requests for line in verify_mask(*r) for cell in line
    ]


def test_slots_and_indptr_of_pass_equal_oracle():
    """Red if scratch slots of two requests mix, or the context is written again."""
    for seed in range(20):
        check_slots(seed)


def test_logits_rows_are_selected_for_parse_passes_only():
    """Red if the LM head runs at all rows x vocabulary, or at our rows of others."""
    verdicts = torch.tensor([3, 5])
    spec_info = MaskedVerifyInput(plan_of([(2, 1, (1,), 2)]), [], verdicts)
    result = SimpleNamespace(draft_extend_select_index=None)
    select_logits_rows(result, SimpleNamespace(spec_info=spec_info))
    assert result.draft_extend_select_index is verdicts
    result = SimpleNamespace(draft_extend_select_index=None)
    select_logits_rows(result, SimpleNamespace(spec_info=None))
    select_logits_rows(result, SimpleNamespace(spec_info=object()))
    assert result.draft_extend_select_index is None


class Graphs:
    """Captured decode graphs that show as many hidden states as they were captured
    with; SGLang raises where more are asked for."""

    def __init__(self, mode: CaptureHiddenMode) -> None:
        self.capture_hidden_mode = mode


class Target:
    """A worker whose runner notes by what each forward was run."""

    def __init__(self, graphs: Graphs | None) -> None:
        self.ran: list[tuple[object, CaptureHiddenMode]] = []
        self.model_runner = SimpleNamespace(
            device="cpu",
            model=SimpleNamespace(lm_head=object(), logits_processor=SimpleNamespace()),
            model_config=SimpleNamespace(model_is_mrope=False),
            server_args=SimpleNamespace(ep_size=1),
            decode_cuda_graph_runner=graphs,
            prefill_cuda_graph_runner=graphs,
            kv_index_translator=SimpleNamespace(bind_own_plan=lambda batch: None),
        )

    def forward_batch_generation(self, *, batch, forward_batch, is_verify):
        wanted = forward_batch.capture_hidden_mode
        self.ran.append((self.model_runner.decode_cuda_graph_runner, wanted))
        rows = torch.zeros(forward_batch.batch_size, 1)
        output = SimpleNamespace(
            next_token_logits=rows, hidden_states=rows, last_hidden_states=rows
        )
        return SimpleNamespace(logits_output=output)


@pytest.mark.parametrize("shows_features", [False, True])
@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("mode", [*CaptureHiddenMode, None])
def test_graphs_serve_the_hidden_states_they_were_captured_with(
    monkeypatch, mode, wants, shows_features
):
    """Red if a plain round asks a captured graph for more than it holds, which stops
    the scheduler, or runs without one where it could be replayed."""
    monkeypatch.setenv("SGLANG_EAGER_INPUT_NO_COPY", "0")  # put back behind the test
    graphs = None if mode is None else Graphs(mode)
    target = Target(graphs)
    verifier = TargetVerifier(target, None)
    verifier.shows_features = shows_features
    lens = torch.tensor([3])
    verifier.decode(
        input_ids=torch.tensor([1]), req_pool_indices=torch.tensor([0]),
        seq_lens=lens, seq_lens_cpu=lens, table=torch.arange(8)[None],
        return_hidden_states=wants,
    )  # fmt: skip
    ((used, wanted),) = target.ran
    least = CaptureHiddenMode.NULL
    if wants:
        least = CaptureHiddenMode.LAST
    if shows_features:
        least = CaptureHiddenMode.FULL
    assert wanted == least
    fits = mode is not None and least.value <= mode.value
    assert used is (graphs if fits else None)
    assert target.model_runner.decode_cuda_graph_runner is graphs
