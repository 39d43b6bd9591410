"""The seams of sglang 0.5.23 that PARSE stands on.

These fail first when the pinned version moves; each names what stops working.
"""

import dataclasses
import inspect
import pkgutil
import re
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from sglang_parse import hooks

pytestmark = pytest.mark.usefixtures("plugins")


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# -- Version, registration, hooks ---------------------------------------------------


def test_installed_sglang_is_the_pinned_one():
    """Red if the pin in pyproject.toml and the installed version drift apart."""
    import sglang

    assert sglang.__version__ == "0.5.23"


def test_entry_point_registers_the_algorithm():
    """Red if SGLang's plugin loader swallowed an error of ours."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.algorithm import ParseAlgorithm

    found = {e.name: e.value for e in entry_points(group="sglang.srt.plugins")}
    assert found["parse"] == "sglang_parse.plugin:register"
    assert isinstance(SpeculativeAlgorithm.from_string("PARSE"), ParseAlgorithm)


ALL_HOOKS = {h.target: h for h in hooks.HOOKS + hooks.CPU_HOOKS}


@pytest.mark.parametrize("target", ALL_HOOKS)
def test_hook_target_exists(target):
    """Red if SGLang renames or moves this seam."""
    assert callable(pkgutil.resolve_name(target))


def test_hooks_are_applied_in_a_process_that_loads_plugins():
    """Red if one of our hooks does not apply; SGLang would only log it."""
    assert hooks.missing_hooks() == []
    hooks.check_hooks.cache_clear()
    hooks.check_hooks()


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda h: h.target)
def test_missing_hook_stops_startup_by_name(monkeypatch, hook):
    """Red if a server can start without one of its hooks."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {hook.target})
    hooks.check_hooks.cache_clear()
    with pytest.raises(RuntimeError, match=hook.target) as error:
        hooks.check_hooks()
    assert sglang.__version__ in str(error.value)
    assert hook.purpose in str(error.value)
    assert "\n" not in str(error.value)


def test_unresolvable_hook_is_logged_and_swallowed_by_sglang():
    """Red if SGLang starts to raise by itself, which makes check_hooks superfluous."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    source = inspect.getsource(HookRegistry.apply_hooks)
    assert "except Exception" in source
    assert "_patched.add" in source


# -- The algorithm object -------------------------------------------------------------


def test_custom_algorithm_lacks_exactly_the_methods_we_add():
    """Red if SGLang starts to define one (drop ours), or calls another it lacks."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    from sglang_parse.algorithm import ParseAlgorithm

    def public(cls):
        return {
            n
            for n, v in vars(cls).items()
            if inspect.isfunction(v) and not n.startswith("_")
        }

    ours = {"carries_draft_hidden_states", "need_topk", "create_future_map"}
    for name in ours:
        assert not hasattr(CustomSpecAlgo, name)
        assert callable(getattr(SpeculativeAlgorithm, name))
        assert callable(getattr(ParseAlgorithm, name))
    lacking = {
        n for n in public(SpeculativeAlgorithm) if not hasattr(CustomSpecAlgo, n)
    }
    # Called for built-in algorithms only.
    assert lacking - ours <= {"get_speculative_worker_cls", "get_platform_worker_cls"}


def test_algorithm_is_no_built_in_one():
    """Red if PARSE takes an EAGLE-only branch of the scheduler by accident."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    parse = SpeculativeAlgorithm.from_string("PARSE")
    assert parse.is_speculative() and not parse.is_none()
    flags = [
        n for n in dir(parse) if n.startswith("is_") and callable(getattr(parse, n))
    ]
    answers = {n for n in flags if not parameters(getattr(parse, n))}
    assert {n for n in answers if getattr(parse, n)()} == {"is_some", "is_speculative"}


def test_future_map_takes_our_arguments():
    """Red if FutureMap's constructor changes."""
    from sglang.srt.managers.overlap_utils import FutureMap

    assert len(parameters(FutureMap.__init__)) == 6  # self and our five


# -- Scheduler and worker -------------------------------------------------------------


def test_worker_constructor_is_called_with_these_keywords():
    """Red if the scheduler passes other keywords to a speculative worker."""
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_parse.worker import ParseWorker

    source = inspect.getsource(Scheduler)
    for name in parameters(ParseWorker.__init__)[1:]:
        assert f"{name}=" in source


def test_worker_implements_what_its_base_leaves_abstract():
    """Red if BaseSpecWorker gains an abstract method."""
    from sglang_parse.worker import ParseWorker

    assert not ParseWorker.__abstractmethods__


def test_worker_base_methods_we_override_exist():
    """Red if an override is called no longer."""
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    for name in (
        "alloc_memory_pool",
        "init_attention_backends",
        "init_cuda_graphs",
        "weight_update_runners",
        "_draft_model_runners",
        "spec_v2_attn_backends",
    ):
        assert hasattr(BaseSpecWorker, name), name


def test_request_fields_we_read_exist():
    """Red if Req loses a field that the worker or the options read."""
    from sglang.srt.managers.schedule_batch import Req

    source = inspect.getsource(Req)
    for name in (
        "origin_input_ids",
        "output_ids",
        "sampling_params",
        "grammar",
        "return_logprob",
        "return_hidden_states",
        "custom_logit_processor",
        "eos_token_ids",
        "tokenizer",
        "kv",
    ):
        assert re.search(rf"self\.{name}\b", source), name
    assert callable(Req.finished)


def test_scheduler_says_who_waits_and_for_how_many_there_is_room():
    """Red if rounds can no longer be shortened for those that wait."""
    from sglang.srt.managers.scheduler import Scheduler

    assert parameters(Scheduler.run_batch)[:2] == ["self", "batch"]
    assert parameters(Scheduler.get_num_allocatable_reqs)[:2] == ["self", "running_bs"]
    assert "self.waiting_queue" in inspect.getsource(Scheduler)


def test_request_is_hashable_by_identity():
    """Red if Req defines equality: states are keyed by the request object."""
    from sglang.srt.managers.schedule_batch import Req

    assert Req.__hash__ is object.__hash__
    assert Req.__eq__ is object.__eq__


def test_kv_record_has_lengths():
    """Red if the allocated length of a request moves (memory.py writes it)."""
    from sglang.srt.managers import schedule_batch

    source = inspect.getsource(schedule_batch)
    assert "kv_allocated_len: int = 0" in source
    assert "kv_committed_len: int = 0" in source


def test_batch_result_fields_we_fill_exist():
    """Red if the scheduler's result record loses a field."""
    from sglang.srt.managers.utils import GenerationBatchResult

    names = {f.name for f in dataclasses.fields(GenerationBatchResult)}
    assert names >= {
        "logits_output",
        "next_token_ids",
        "accept_lens",
        "cap_lens",
        "speculative_output_stride",
        "new_seq_lens",
        "next_draft_input",
        "can_run_cuda_graph",
    }


def test_allocation_functions_take_our_arguments():
    """Red if KV slots are taken or written by another signature."""
    from sglang.srt.mem_cache import allocation, allocation_sizing

    assert parameters(allocation.alloc_token_slots)[:2] == ["tree_cache", "num_tokens"]
    writer = inspect.unwrap(allocation.assign_req_to_token_pool_func)
    assert len(parameters(writer)) in (2, 6)  # (*args, **kwargs) once hooked
    assert parameters(allocation_sizing.get_alloc_reserve_per_decode) == []


def test_row_is_wide_enough_for_the_scheduler_reserve():
    """Red if SGLang's own reserve can run into the next request's row (TRAP 3).

    Row width is the context length + 4 + draft width, the reserve twice the width.
    """
    from sglang.srt.mem_cache import allocation_sizing

    from sglang_parse.algorithm import NUM_DRAFT_TOKENS

    reserve = inspect.getsource(allocation_sizing.get_alloc_reserve_per_decode)
    assert "return 2 * get_alloc_len_per_decode()" in reserve
    width = inspect.getsource(allocation_sizing.get_req_to_token_extra_context_len)
    assert "4 + (max_speculative_num_draft_tokens() or 0)" in width
    assert 2 * NUM_DRAFT_TOKENS <= 4 + NUM_DRAFT_TOKENS


# -- Forward pass ---------------------------------------------------------------------


def test_forward_batch_fields_we_fill_exist():
    """Red if a hand-built ForwardBatch no longer has these fields."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    names = {f.name for f in dataclasses.fields(ForwardBatch)}
    assert names >= {
        "forward_mode",
        "batch_size",
        "input_ids",
        "req_pool_indices",
        "seq_lens",
        "seq_lens_cpu",
        "seq_lens_sum",
        "out_cache_loc",
        "positions",
        "spec_algorithm",
        "spec_info",
        "capture_hidden_mode",
        "extend_seq_lens",
        "extend_prefix_lens",
        "extend_start_loc",
        "extend_num_tokens",
        "extend_seq_lens_cpu",
        "extend_prefix_lens_cpu",
        "extend_logprob_start_lens_cpu",
        "global_num_token_non_padded_cpu",
        "return_hidden_states_before_norm",
    }


def test_logits_processor_honours_our_rows_in_the_verify_pass():
    """Red if `draft_extend_select_index` is dropped, or read in other modes only."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor

    names = {f.name for f in dataclasses.fields(LogitsMetadata)}
    assert "draft_extend_select_index" in names
    source = inspect.getsource(LogitsProcessor._get_pruned_states)
    branch = source[: source.index("sample_indices = None")]
    assert "is_target_verify()" in branch
    assert "hidden_states[draft_extend_select_index]" in branch


def test_ranks_may_be_made_to_wait_for_each_other_before_they_gather_logits():
    """Red if the switch of verify.wait_in_gathers is called otherwise, or copied to
    where it would not be read."""
    from sglang.srt.distributed.device_communicators import triton_symm_mem_ag
    from sglang.srt.layers.logits_processor import LogitsProcessor

    assert "self._logits_gatherer = " in inspect.getsource(LogitsProcessor.__init__)
    gatherer = triton_symm_mem_ag.MultimemAllGatherer
    before = vars(gatherer(1, enabled=False, skip_entry_sync=True))
    assert before["_skip_entry_sync"] is True
    assert "self._skip_entry_sync" in inspect.getsource(gatherer.__call__)


def test_flashinfer_asks_the_spec_input_for_ragged_arrays():
    """Red if the FlashInfer backend builds the verify arrays itself."""
    from pathlib import Path

    import sglang

    path = Path(sglang.__file__).parent / "srt/layers/attention/flashinfer_backend.py"
    source = path.read_text(encoding="utf-8")
    assert "generate_attn_arg_prefill(" in source
    call = source[source.index(".generate_attn_arg_prefill(") :][:600]
    assert "req_pool_indices" in call


def test_spec_input_types_we_reuse_exist():
    """Red if the closed enum of spec inputs loses a value."""
    from sglang.srt.speculative.spec_info import SpecInputType

    assert {"NGRAM_VERIFY", "EAGLE_DRAFT"} <= set(SpecInputType.__members__)


def test_attention_backend_is_known_by_name():
    """Red if our backend is no choice of --attention-backend or is not registered."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_parse.platform_entry import ATTENTION_BACKEND

    assert ATTENTION_BACKEND in ATTENTION_BACKENDS
    assert ATTENTION_BACKEND in choices.ATTENTION_BACKEND_CHOICES


# -- Sampling -------------------------------------------------------------------------


def test_filter_batch_repeats_and_reorders_rows():
    """Red if filter_batch starts to need unique or sorted indices."""
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_parse.sampling import expand_rows

    info = SamplingBatchInfo(
        temperatures=torch.tensor([[1.0], [2.0], [3.0]]),
        top_ps=torch.tensor([0.1, 0.2, 0.3]),
        top_ks=torch.tensor([1, 2, 3], dtype=torch.int32),
        min_ps=torch.tensor([0.0, 0.5, 0.9]),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=4,
        logit_bias=torch.eye(3, 4),
        sampling_seed=torch.tensor([7, 8, 9]),
        penalizer_orchestrator=None,
        device="cpu",
    )
    info.acc_additive_penalties = torch.arange(12.0).view(3, 4)
    rows = expand_rows(info, [2, 0, 2, 2], "cpu")
    assert rows.temperatures.flatten().tolist() == [3.0, 1.0, 3.0, 3.0]
    assert rows.top_ks.tolist() == [3, 1, 3, 3]
    assert rows.sampling_seed.tolist() == [9, 7, 9, 9]
    assert torch.equal(rows.logit_bias, torch.eye(3, 4)[[2, 0, 2, 2]])
    assert rows.acc_additive_penalties[0].tolist() == [8.0, 9.0, 10.0, 11.0]
    assert info.top_ks.tolist() == [1, 2, 3], "the batch's own record was changed"
    assert rows.penalizer_orchestrator is None


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_agree_on_sampled_tokens(monkeypatch, tp_size):
    """Red if ranks sample for themselves, or SGLang's sampler asks something else
    whether they have to agree: one different token and their next collective hangs."""
    import torch
    from sglang.srt.layers.sampler import Sampler

    from sglang_parse import sampling

    parallel = SimpleNamespace(tp_size=tp_size)
    monkeypatch.setattr(sampling, "get_parallel", lambda: parallel)
    seen = []

    def sampler(output, info, *_):
        seen.append(bool(info.grammars))
        return torch.zeros(1)

    info = SimpleNamespace(apply_logits_bias=lambda logits: None)
    sampling.sample_rows(
        SimpleNamespace(sampler=sampler),
        torch.zeros(1, 4),
        sampling_info=info,
        positions=torch.zeros(1),
        grammar_mask=None,
        needs=sampling.LogprobNeeds(False, [0], [None]),
    )
    monkeypatch.setattr(sampling, "expand_rows", lambda *_: SimpleNamespace())
    monkeypatch.setattr(sampling.dataclasses, "replace", lambda *_, **__: None)
    seen.append(bool(sampling.draft_rows(None, [0], "cpu").grammars))
    assert seen == [tp_size > 1] * 2
    source = inspect.getsource(Sampler._sync_token_ids_across_tp)
    assert "or sampling_info.grammars:" in source


def test_report_outlives_incremental_streaming():
    """Red if the report goes by the number of tokens sent before it, or if SGLang's
    slices are no longer what they were."""
    from sglang.srt.managers import tokenizer_manager

    from sglang_parse.report import keep_report

    original = tokenizer_manager._slice_streaming_output_meta_info
    original = getattr(original, "__wrapped__", original)
    meta_info = {"parse": [{"mode": "exact"}], "other": [1, 2, 3], "id": "x"}
    keep_report(original, meta_info, 2, ["parse", "other"])
    assert meta_info == {"parse": [{"mode": "exact"}], "other": [3], "id": "x"}
    plain = {"other": [1, 2, 3]}
    keep_report(original, plain, 2, ["parse", "other"])
    assert plain == {"other": [3]}


def test_sampling_params_verify_is_the_gate_of_requests():
    """Red if custom_params or verify() move: bad values would reach the scheduler."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    good = SamplingParams(custom_params={"parse_mode": "off", "other": 1})
    good.verify(1000)
    bad = SamplingParams(custom_params={"parse_mode": "loud"})
    with pytest.raises(ValueError, match=r"custom_params\.parse_mode"):
        bad.verify(1000)


# -- Output ---------------------------------------------------------------------------


def test_streamer_adds_the_report_of_finished_requests(monkeypatch):
    """Red if the output streamer's seam moves or expects another shape."""
    from sglang.srt.managers.scheduler_components.output_streamer import (
        SchedulerOutputStreamer,
    )
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_parse import report
    from sglang_parse.metrics import RequestReport

    assert SchedulerOutputStreamer.has_additional_customized_info is False
    parameters_ = parameters(SchedulerOutputStreamer.build_additional_customized_info)
    assert parameters_ == ["self", "reqs"]
    monkeypatch.setattr(report.TELEMETRY, "settings", None)
    assert report.streamer_class(SchedulerOutputStreamer) is SchedulerOutputStreamer
    monkeypatch.setattr(report.TELEMETRY, "settings", {})
    cls = report.streamer_class(SchedulerOutputStreamer)
    assert issubclass(cls, SchedulerOutputStreamer)
    assert report.streamer_class(SchedulerOutputStreamer) is cls

    class Req(SimpleNamespace):
        __hash__ = object.__hash__

    ended = {"output_ids": [5], "finished_len": None, "tokenizer": None, "rid": "r"}
    ended |= {"sampling_params": SamplingParams(), "finished_reason": None}
    done = Req(finished=lambda: True, **ended)
    running = Req(finished=lambda: False)
    other = Req(finished=lambda: True)
    report.attach(done, RequestReport("exact", "", False))
    report.attach(running, RequestReport("off", "grammar", False))
    streamer = object.__new__(cls)
    info = streamer.build_additional_customized_info([done, running, other])
    assert [len(v) for v in info["parse"]] == [1, 0, 0]
    assert info["parse"][0][0]["mode"] == "exact"
    assert streamer.build_additional_customized_info([other]) == {}


def test_accept_figures_are_where_we_correct_them():
    """Red if SGLang divides kept drafts by something else than we make up for."""
    from sglang.srt.managers.scheduler_components.metrics_reporter import (
        SchedulerMetricsReporter,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    assert parameters(TokenizerManager._calculate_spec_decoding_metrics) == [
        "self", "meta_info", "recv_obj", "i",
    ]  # fmt: skip
    source = inspect.getsource(TokenizerManager._calculate_spec_decoding_metrics)
    for name in ("spec_num_proposed_drafts", "spec_accept_rate", "spec_num_cap_tokens"):
        assert name in source
    source = inspect.getsource(SchedulerMetricsReporter.report_decode_stats)
    for text in (
        "self.forward_ct_decode % self.decode_log_interval != 0",
        "num_correct_drafts = self.spec_num_correct_drafts",
        "self.spec_num_forward_ct * draft_per_round",
        "self.spec_num_cap_tokens = 0",
    ):
        assert text in source


def test_endpoints_lack_what_we_add():
    """Red if SGLang learns of predictions or of reports in streams by itself."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai import protocol, serving_chat
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    fields = protocol.ChatCompletionRequest.model_fields
    assert "prediction" not in fields and "return_meta_info" in fields
    assert "return_meta_info" not in protocol.CompletionRequest.model_fields
    details = protocol.CompletionTokensDetails.model_fields
    assert "accepted_prediction_tokens" not in details
    source = inspect.getsource(serving_chat)
    assert "return_meta_info is not supported with streaming" in source
    assert inspect.isasyncgenfunction(inspect.unwrap(TokenizerManager.generate_request))
    setup = inspect.unwrap(http_server._setup_and_run_http_server)
    assert parameters(setup)[0] == "server_args"


def test_prefill_batch_names_its_unfinished_request():
    """Red if a client's text could be judged before its prompt is whole."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch

    assert "chunked_req" in {f.name for f in dataclasses.fields(ScheduleBatch)}
    wanted = ["self", "message", "status_code", "err_type"]
    assert parameters(FINISH_ABORT.__init__) == wanted


def test_pool_configurator_asks_us_for_the_draft_bytes():
    """Red if the cell size is computed elsewhere: the draft pool is unbudgeted then."""
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    source = inspect.getsource(DefaultPoolConfigurator)
    assert "self._compute_cell_size(" in source


def test_kv_pool_seam_of_the_cpu_platform():
    """Red if the Triton warm-up is not the method that our pool leaves out."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    assert "_init_kv_copy_and_warmup" in vars(MHATokenToKVPool)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sglang.srt.speculative.draft_parallel", "resolve_draft_parallel_layout"),
        ("sglang.srt.speculative.spec_utils", "draft_tp_context"),
        ("sglang.srt.speculative.spec_utils", "draft_pp_context"),
        ("sglang.srt.layers.moe.utils", "draft_model_build_scope"),
        ("sglang.srt.configs.draft_parallel", "DraftTPExecution.TARGET_LAYOUT"),
        ("sglang.srt.configs.hybrid_arch", "mambaish_config"),
        ("sglang.srt.utils.hf_transformers_utils", "get_tokenizer"),
        ("sglang.srt.managers.tp_worker", "TpModelWorker"),
        ("sglang.srt.runtime_context", "get_parallel"),
    ],
)
def test_imported_name_exists(module, name):
    """Red if a name that is imported inside a function moves."""
    assert pkgutil.resolve_name(f"{module}:{name}") is not None


def test_forwards_look_for_graphs_where_they_are_taken_away():
    """Red if SGLang keeps its captured graphs, or the hidden states they show, under
    other names than `verify.without_graphs` and `TargetVerifier.decode` know."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    forward = inspect.getsource(ModelRunner._forward_raw)
    for name in ("decode_cuda_graph_runner", "prefill_cuda_graph_runner"):
        assert f"self.{name}" in forward
    check = decode_cuda_graph_runner.DecodeCudaGraphRunner._validate_capture_hidden_mode
    source = inspect.getsource(check)
    assert "self.capture_hidden_mode < forward_batch.capture_hidden_mode" in source


def test_memory_saver_keeps_draft_weights_where_we_ask_for_it():
    """algorithm.handle_server_args: a weight update brings back the target's alone."""
    from sglang.srt.model_executor.model_runner_components import load_model_utils

    source = inspect.getsource(load_model_utils)
    assert "is_draft_worker and get_exec().features.enable_draft_weights_cpu" in source


def test_routed_experts_have_rows_for_a_prefill():
    """memory.longest_pass: a longer pass would stop the scheduler."""
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    source = inspect.getsource(RoutedExpertsCapturer)
    assert "max_batch_size = max(" in source
    assert "get_schedule().chunked_prefill_size" in source
