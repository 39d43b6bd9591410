"""Every run-time change of an SGLang object: what sgl/compat changes exists, and
is read where its docstrings say."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.options.request import RequestOptions
from sglang_parse.options.server import ParseConfig
from sglang_parse.sgl.compat import backend_changes as backends
from sglang_parse.sgl.compat import graph_changes as graphs
from sglang_parse.sgl.compat import model_changes as models
from sglang_parse.sgl.compat import pool_changes as pools
from sglang_parse.sgl.compat import request_changes as requests
from sglang_parse.sgl.families import family_of
from sglang_parse.verify.backends.routes import BACKENDS
from tests.support.tiny_mtp import NAMES, build_with_mtp

pytestmark = pytest.mark.usefixtures("plugins")


def source_of(path: str) -> str:
    """A file of SGLang as text: some import on a GPU only."""
    import sglang

    root = Path(sglang.__file__).parent / "srt"
    return (root / path).read_text(encoding="utf-8")


FOLDER = Path(graphs.__file__).parent


def changes():
    """The functions of sgl/compat by name."""
    modules = (backends, graphs, models, pools, requests)
    assert {Path(m.__file__).name for m in modules} == {
        path.name for path in FOLDER.glob("*.py") if path.name != "__init__.py"
    }
    return {
        name: f
        for module in modules
        for name, f in inspect.getmembers(module, inspect.isfunction)
        if f.__module__ == module.__name__ and not name.startswith("_")
    }


def test_every_change_has_its_file_and_its_end():
    """Red if a function joins sgl/compat without saying where SGLang needs it and
    what would end the need, or names a file that SGLang no longer has."""
    import sglang

    root = Path(sglang.__file__).parent / "srt"
    functions = changes()
    assert len(functions) >= 8
    for function in functions.values():
        text = inspect.getdoc(function)
        for part in ("What: ", "Why: ", "Where: ", "Ends with: "):
            assert text.count(part) == 1, (function.__name__, part)
        where = text[text.index("Where: ") : text.index("Ends with: ")]
        files = re.findall(r"[\w/]+\.py", where)
        assert files, function.__name__
        for file in files:
            assert list(root.rglob(f"*{Path(file).name}")), (function.__name__, file)


def test_every_change_is_named_by_a_contract_test():
    """Red if a function joins sgl/compat without a test of what it takes of
    SGLang."""
    folder = Path(__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("test_*.py")]
    named = {word for text in texts for word in re.findall(r"\w+", text)}
    assert not [name for name in changes() if name not in named]


#: How our code calls objects that live in SGLang, and SGLang's types of them.
THINGS = {"req", "runner", "manager", "reporter", "scheduler", "allocator", "executor"}
TYPES = ("SchedulerRequest", "SchedulerBatch", "RoundBatch", "ModelRunner")
#: What is written elsewhere, and why that is no change of SGLang.
ELSEWHERE = {
    "frontend/adapter.py: executor.backend",  # of a program, in the user's process
    "shield/bounded_stops.py: schedule_batch.re",  # which imports nothing of ours
}


def sglangs_things(tree: ast.AST) -> set[str]:
    """Names of a module for what is SGLang's or torch's: imports, arguments, locals."""
    names = set(THINGS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = getattr(node, "module", None) or alias.name
                if module.split(".")[0] in ("sglang", "torch"):
                    names.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.arg) and node.annotation is not None:
            names |= {node.arg} if ast.unparse(node.annotation) in TYPES else set()
    return names


def written(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(owner, attribute) of what a module sets or deletes, the latter as source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node.args[0]), ast.unparse(node.args[1])


def changes_of_sglang(source: str) -> list[str]:
    """What a module changes of SGLang. A field that we add for ourselves has our name,
    and SGLang does not read it."""
    tree = ast.parse(source)
    things = sglangs_things(tree)
    return [
        f"{owner}.{name}"
        for owner, name in written(tree)
        if things & set(re.findall(r"\w+", owner))
        and not re.match(r"_?parse_|QUEUE$", name)
    ]


def test_nothing_but_compat_changes_a_thing_of_sglang():
    """Red if a module sets a field of what it imports of SGLang or torch, or of an
    object of a running server: only sgl/compat may, where each change has its
    reason and test."""
    root = FOLDER.parents[1]
    found = {
        f"{path.relative_to(root)}: {change}"
        for path in root.rglob("*.py")
        if path.parent != FOLDER
        for change in changes_of_sglang(path.read_text(encoding="utf-8"))
    }
    assert not found - ELSEWHERE


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("self._target.runner.mtp_pools = ()", "self._target.runner.mtp_pools"),
        ("def f(reporter): reporter.count += 1", "reporter.count"),
        ("def f(batch: SchedulerBatch): batch.seq_lens = 1", "batch.seq_lens"),
        ("setattr(scheduler, name, 1)", "scheduler.name"),
        ("from sglang import srt as s\ndel s.x", "s.x"),
        ("manager.parse_state = 1; batch = 1; round.x = 1", ""),
    ],
)
def test_changes_are_seen_however_they_are_written(line, change):
    """Red if the test above overlooks a change."""
    assert changes_of_sglang(line) == ([change] if change else [])


@pytest.mark.contract_source
def test_triton_reads_its_buffers_from_the_backend():
    """Red if Triton's index buffers are called otherwise, or are not read at each
    forward: a verify pass would write past them (`holds_pass`)."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    source = inspect.getsource(TritonAttnBackend)
    buffers = BACKENDS["triton"].buffers
    assert {b.name for b in buffers} == {"kv_indptr", "qo_indptr", "window_kv_indptr"}
    for buffer in buffers:
        assert buffer.owner == ""
        assert re.search(
            rf"self\.{buffer.name} = torch\.zeros\(\s*\(max_bs \+ 1,", source
        )
        assert f"self.{buffer.name}[: bs + 1]" in source


@pytest.mark.contract_source
def test_flashinfer_reads_its_last_pages_from_the_updater():
    """Red if FlashInfer's prefill planner takes last pages from elsewhere, or they are
    anything but ones."""
    source = source_of("layers/attention/flashinfer_backend.py")
    (buffer,) = BACKENDS["flashinfer"].buffers
    assert f"self.{buffer.owner} = FlashInferIndicesUpdaterPrefill(" in source
    updater = source[source.index("class FlashInferIndicesUpdaterPrefill") :]
    assert f"self.{buffer.name}[:bs]" in updater
    assert f"self.{buffer.name} = torch.ones(" in source and buffer.fill == 1


@pytest.mark.parametrize("name", ["flashattention_backend", "torch_native_backend"])
def test_backends_of_the_rows_route_read_their_table_at_each_forward(name):
    """Red if a backend keeps the table itself, or a pair of backends is no longer one
    of them for prefills (`holds_pass`)."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    source = source_of(f"layers/attention/{name}.py")
    assert "self.req_to_token_pool = model_runner.req_to_token_pool" in source
    assert "self.req_to_token_pool.req_to_token" in source
    whole = inspect.getsource(HybridAttnBackend)
    assert "self.prefill_backend = prefill_backend" in whole
    table, pool = torch.zeros(1, 2), SimpleNamespace()
    inner = SimpleNamespace(req_to_token_pool=pool)
    for backend in (inner, SimpleNamespace(prefill_backend=inner)):
        with backends.holds_pass(backend, (), num_sequences=3, table=table):
            assert inner.req_to_token_pool.req_to_token is table
        with backends.holds_pass(backend, (), num_sequences=3):
            assert inner.req_to_token_pool is pool
        assert inner.req_to_token_pool is pool


@pytest.mark.contract_source
def test_eager_runner_reads_the_no_copy_switch_at_each_forward():
    """Red if SGLANG_EAGER_INPUT_NO_COPY is read once, or elsewhere, or called
    otherwise: verify passes would run over buffers sized by requests
    (`pass_eager_inputs_through`)."""
    import sglang
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    assert hasattr(envs, "SGLANG_EAGER_INPUT_NO_COPY")
    load = inspect.getsource(EagerRunner.load_batch)
    switch = load.index("if envs.SGLANG_EAGER_INPUT_NO_COPY.get():")
    assert switch < load.index("registry.fill_from(")
    assert "return replace(forward_batch)" in load[switch:]
    readers = [
        path.name
        for path in (Path(sglang.__file__).parent / "srt").rglob("*.py")
        if "EAGER_INPUT_NO_COPY.get()" in path.read_text(encoding="utf-8")
    ]
    assert readers == ["eager_runner.py"]


def test_ranks_may_be_made_to_wait_for_each_other_before_they_gather_logits():
    """Red if the switch of `wait_in_gathers` is called otherwise, or copied to where it
    would not be read."""
    from sglang.srt.distributed.device_communicators import triton_symm_mem_ag
    from sglang.srt.layers.logits_processor import LogitsProcessor

    assert "self._logits_gatherer = " in inspect.getsource(LogitsProcessor.__init__)
    gatherer = triton_symm_mem_ag.MultimemAllGatherer
    one = gatherer(1, enabled=False, skip_entry_sync=True)
    assert vars(one)["_skip_entry_sync"] is True
    assert "self._skip_entry_sync" in inspect.getsource(gatherer.__call__)
    models.wait_in_gathers(SimpleNamespace(_logits_gatherer=one))
    assert one._skip_entry_sync is False


def test_runners_plan_plain_decode_graphs():
    """Red if SGLang would capture the runners' decode graphs as verify passes again.

    Its capture asks just this of a runner.
    """
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    source = inspect.getsource(DecodeCudaGraphRunner.__init__)
    assert "if model_runner.spec_algorithm.is_speculative():" in source
    parse = SpeculativeAlgorithm.from_string("PARSE")
    assert parse.is_speculative() and not parse.supports_target_verify_for_draft()
    runner = SimpleNamespace(spec_algorithm=parse)
    backends.plan_plain_decode(runner)
    assert not runner.spec_algorithm.is_speculative()
    assert runner.spec_algorithm.is_none()


def test_a_target_is_made_to_show_its_features():
    """Red if layers are marked by another call, or their ids come otherwise."""
    seen = []
    processor = SimpleNamespace(keep_last_hidden_states=False)
    model = SimpleNamespace(
        set_eagle3_layers_to_capture=seen.append, logits_processor=processor
    )
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    size = SimpleNamespace(hidden_size=2)
    target = SimpleNamespace(model=model, model_config=size)
    for config in (SimpleNamespace(eagle_config=ids), SimpleNamespace()):
        models.show_layers(target, "--flag", head_config=config)
    assert seen == [[1, 2, 3], None]
    assert processor.keep_last_hidden_states is True
    with pytest.raises(ValueError, match="--flag: SimpleNamespace cannot show"):
        lacks = SimpleNamespace(model=SimpleNamespace())
        models.show_layers(lacks, "--flag", head_config=SimpleNamespace())


def test_a_draft_of_such_a_target_is_its_head():
    """Red if SGLang loads the whole target again for `--speculative-parse-compose mtp`,
    or gives the head other names, layers or slots than we count with."""
    config = source_of("configs/model_config.py")
    for target, head in (
        ("DeepseekV3ForCausalLM", "DeepseekV3ForCausalLMNextN"),
        ("Glm4MoeForCausalLM", "Glm4MoeForCausalLMNextN"),
    ):
        assert family_of(target).mtp and not family_of(head).why
        renamed = config.partition(f'self.hf_config.architectures[0] = "{head}"')
        assert f'"{target}"' in renamed[0] and renamed[2]
    pools = source_of("mem_cache/kv_cache_configurator.py")
    assert "[0]\n            if self.is_draft_worker\n" in pools
    for file, reads in (
        ("deepseek_nextn", "previous_hidden_states = forward_batch.spec_info.hidden"),
        ("glm4_moe_nextn", "forward_batch.spec_info.hidden_states"),
    ):
        assert reads in source_of(f"models/{file}.py")


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_is_the_model_of_its_checkpoint(tmp_path, name):
    """Red if SGLang takes a draft with such a head for the head, or gives it as many
    layers, and if a later head is taken for its model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components import layer_setup

    build_with_mtp(name, tmp_path)
    architectures = []
    for is_head, layers in ((True, 1), (False, 2), (True, 1)):
        with models.loaded_as_it_is(is_head=is_head):
            config = ModelConfig(str(tmp_path), is_draft_model=True)
        num = layer_setup._compute_model_num_layers(
            model=None, model_config=config, is_draft_worker=True
        )
        assert num == layers
        architectures.append(config.hf_config.architectures[0])
    head, model = architectures[:2]
    assert architectures == [head, model, head] and head == f"{model}NextN"


def test_allocated_length_is_what_sglang_frees_and_reserves_by():
    """Red if a request's slots are counted in another field: they would be lost."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation, common

    assert "kv_allocated_len: int = 0" in inspect.getsource(schedule_batch)
    assert "kv.kv_allocated_len" in inspect.getsource(allocation.alloc_for_spec_decode)
    assert "kv.kv_allocated_len" in inspect.getsource(common.release_kv_cache)
    req = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=3))
    requests.set_allocated_len(req, 8)
    assert req.kv.kv_allocated_len == 8


class Letters:
    """A token a letter."""

    eos_token_id = ord("z")
    additional_stop_token_ids = None

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def encode(self, text, **_):
        return [ord(c) for c in text]


def request(text: str, **params):
    """SGLang's own Req with an output."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokenizer = Letters()
    sampling = SamplingParams(**params)
    sampling.normalize(tokenizer)
    req = Req("r", "", [5], sampling, vocab_size=1 << 20)
    req.tokenizer = tokenizer
    req.output_ids = tokenizer.encode(text)
    return req


def test_aborted_request_ends_with_its_error():
    """Red if SGLang looks for an abort elsewhere, or keeps other facts of it."""
    req = request("a", max_new_tokens=9)
    status = HTTPStatus.SERVICE_UNAVAILABLE
    requests.abort(req, "No room.", status=status, err_type="ServiceUnavailableError")
    assert not req.finished()
    req.update_finish_state(1)
    assert req.finished() and req.finished_reason.message == "No room."
    assert req.finished_reason.status_code == status
    assert req.finished_reason.err_type == "ServiceUnavailableError"


def test_plainly_served_request_asks_for_nothing_of_parse():
    """Red if a request's own options stand elsewhere than in its parameters."""
    req = request("a", custom_params={"parse_mode": "semantic", "other": 1})
    requests.serve_plainly(req)
    options = RequestOptions.of(req, ParseConfig())
    assert options.mode == "off"


def test_a_server_says_what_its_model_reads_in_two_fields():
    """Red if the warm-up asks for something else: it would send an image, and a server
    that refuses images would end itself (`hide_media`)."""
    source = source_of("entrypoints/http_server.py")
    assert '"has_image_understanding": model_config.is_image_understandable_model' in (
        source
    )
    warm_up = source[source.index("def _execute_server_warmup(") :]
    assert 'model_info.get("has_image_understanding"' in warm_up[:9000]
    config = SimpleNamespace()
    models.hide_media(config, images=True)
    assert vars(config) == {"is_audio_understandable_model": False}
    models.hide_media(config, images=False)
    assert config.is_image_understandable_model is False


@pytest.mark.parametrize(
    "params", [{}, {"stop": ["z"]}, {"stop_regex": ["z"]}, {"stop_token_ids": [122]}]
)
def test_held_request_runs_until_it_is_released(params):
    """Red if SGLang ends a request that gets no token for another reason than those
    that `hold` takes away, or does not end it once it is released."""
    req = request("z", max_new_tokens=1, **params)
    requests.hold(req)
    for num_new in (1, 0, 0):
        req.update_finish_state(num_new)
        assert not req.finished()
    requests.release(req)
    req.update_finish_state(0)
    assert req.finished() and req.finished_len == 1


def test_nothing_of_a_barred_request_reaches_the_radix_cache(monkeypatch):
    """Red if SGLang publishes a request's KV at the end of its prefill or of its answer
    although it is barred from that."""
    from sglang.srt.mem_cache import common

    told = []
    cache = SimpleNamespace(
        checkpoint=lambda req, *, up_to: told.append("checkpoint"),
        claim_kv_row=lambda req: False,
        free_kv_row=lambda kv, spans: None,
        unlock=lambda lock: None,
        on_release=lambda req, *, checkpointed: told.append(checkpointed),
        req_to_token_pool=SimpleNamespace(free=lambda req: None),
    )
    overallocated = "_release_overallocated_kv_indices"
    monkeypatch.setattr(common, overallocated, lambda *_: None)
    for barred, expected in (
        (False, ["checkpoint", "checkpoint", True]),
        (True, [False]),
    ):
        told.clear()
        req = request("a", max_new_tokens=1)
        if barred:
            requests.bar_from_cache(req)
        common.checkpoint_kv_cache(req, cache)
        req.kv = SimpleNamespace(
            holds_kv=True,
            is_kv_released=False,
            cache_protected_len=0,
            kv_allocated_len=0,
            mark_kv_released=lambda: None,
        )
        req.lock, req.owned_kv_len = None, lambda: 0
        req.update_finish_state(1)
        assert req.finished()
        common.release_kv_cache(req, cache, checkpoint=True)
        assert told == expected


@pytest.mark.parametrize("before", [[], [3], [1, 0, 2, 0, 1]])
@pytest.mark.parametrize(
    ("passes", "histogram"),
    [([0], []), ([1] * 4, [4]), ([3, 1, 3], [1, 0, 2]), ([2], [0, 1])],
)
def test_passes_of_a_result_are_counted_each(passes, histogram, before):
    """Red if SGLang counts correct drafts in another way than number of tokens less
    one, or takes rounds in a row for one pass: the figures of a request would run away
    while it waits, or say that drafts were right that nobody wrote."""
    from sglang.srt.managers.scheduler_components import batch_result_processor

    source = inspect.getsource(batch_result_processor)
    assert "length - num_non_draft for length in accept_lens" in source
    assert "req.spec_verify_ct += 1" in source
    assert "req.spec_num_correct_drafts += num_correct_drafts" in source
    assert "req.update_spec_correct_drafts_histogram(num_correct_drafts)" in source
    req = request("a")
    req.spec_correct_drafts_histogram, req.spec_num_correct_drafts = [*before], 7
    req.spec_verify_ct = 5
    requests.emits_passes(req, passes)
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += sum(passes) - 1
    req.update_spec_correct_drafts_histogram(sum(passes) - 1)
    right = sum(num - 1 for num in passes if num)
    assert req.spec_verify_ct == 5 + len(passes)
    assert req.spec_num_correct_drafts == 7 + right
    counts = zip_longest(before, histogram, fillvalue=0)
    expected = [old + new for old, new in counts]
    found = req.spec_correct_drafts_histogram
    assert found == expected + [0] * (len(found) - len(expected))


def test_passes_of_a_result_are_counted_in_the_servers_figures():
    """Red if `accept len` in SGLang's log comes of other figures, or takes several
    passes for one."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.managers.scheduler_components.metrics_reporter import (
        SchedulerMetricsReporter,
    )

    source = inspect.getsource(batch_result_processor)
    assert "self.metrics_reporter.update_spec_metrics(" in source
    assert "self.metrics_reporter = " in inspect.getsource(scheduler)
    reporter = SimpleNamespace(
        spec_num_accept_tokens=0,
        spec_num_correct_drafts=0,
        spec_num_forward_ct=0,
        spec_num_block_accept_tokens=0,
        spec_num_cap_tokens=0,
    )
    requests.count_in_log(reporter, num_passes=5, num_drafts=-5)
    # Two requests of four passes with two tokens, and of three with one.
    SchedulerMetricsReporter.update_spec_metrics(
        reporter, 2, num_correct_drafts=8 + 3 - 2, num_accept_tokens=8 + 3
    )
    assert reporter.spec_num_forward_ct == 7
    assert reporter.spec_num_correct_drafts == 4


def test_a_target_shows_the_layers_of_a_probe_beside_the_heads():
    """Red if models mark layers elsewhere, or if columns are taken for others."""
    from sglang.srt.models.llama import LlamaForCausalLM

    inner = SimpleNamespace(layers_to_capture=[2, 12, 21])
    model = SimpleNamespace(
        model=inner,
        pp_group=SimpleNamespace(is_last_rank=True),
        logits_processor=SimpleNamespace(keep_last_hidden_states=False),
    )
    model.set_eagle3_layers_to_capture = partial(
        LlamaForCausalLM.set_eagle3_layers_to_capture, model
    )
    target = SimpleNamespace(model=model, model_config=SimpleNamespace(hidden_size=2))
    shown = models.show_layers(target, "--flag", layers=(6, 12, 18))
    assert shown.layers == (2, 6, 12, 18, 21) and shown.head == (2, 12, 21)
    assert shown.columns(shown.head) == [0, 1, 4, 5, 8, 9]
    assert shown.columns((6, 12, 18)) == [2, 3, 4, 5, 6, 7]
    assert inner.layers_to_capture == [2, 6, 12, 18, 21]
    assert model.logits_processor.keep_last_hidden_states is True
    model.set_eagle3_layers_to_capture = lambda layers: None
    with pytest.raises(ValueError, match="--flag: SimpleNamespace cannot show"):
        models.show_layers(target, "--flag", layers=(7,))


def test_a_request_id_reaches_the_hook_of_the_internal_state():
    """Red if SGLang's call carries an id of its own, or no longer any."""
    from sglang.srt.managers.io_struct import GetInternalStateReq
    from sglang.srt.managers.scheduler import Scheduler

    assert GetInternalStateReq().rid is None
    assert GetInternalStateReq(rid="parse-pairs:0:0").rid == "parse-pairs:0:0"
    parameters = list(inspect.signature(Scheduler.get_internal_state).parameters)
    assert parameters == ["self", "recv_req"]


@pytest.mark.parametrize("shown", [True, False])
def test_final_states_stand_beside_those_of_layers(shown):
    """Red if SGLang keeps the final hidden states elsewhere than `take_states` looks
    where layers are shown, or moves them where none are."""
    from sglang.srt.layers.logits_processor import (
        LogitsProcessor,
        LogitsProcessorOutput,
    )
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    final, layers = torch.arange(6.0).view(3, 2), torch.ones(3, 4)
    metadata = SimpleNamespace(capture_hidden_mode=CaptureHiddenMode.FULL)
    kept = LogitsProcessor._get_last_hidden_states_to_store(
        SimpleNamespace(keep_last_hidden_states=True),
        final,
        layers if shown else None,
        metadata,
    )
    output = LogitsProcessorOutput(
        next_token_logits=None,
        hidden_states=layers if shown else final,
        last_hidden_states=kept,
    )
    states = models.take_states(output, torch.tensor([2]))
    assert states.final is final and states.layers is (layers if shown else None)
    assert output.hidden_states.equal(final[2:])


def test_a_hierarchical_cache_takes_slots_from_the_pool_itself():
    """Red if KV comes back into slots that `tell_of_slots` does not hear of."""
    source = source_of("mem_cache/hybrid_cache/hybrid_cache_controller.py")
    assert "device_indices = full_allocator.alloc(len(host_indices))" in source
    told: list[int] = []
    allocator = SimpleNamespace(
        alloc=lambda num: torch.arange(num) if num < 5 else None,
        alloc_extend=lambda *, extend_num_tokens: torch.arange(extend_num_tokens),
    )
    pools.tell_of_slots(allocator, lambda slots: told.append(len(slots)))
    assert allocator.alloc(9) is None and len(allocator.alloc(3)) == 3
    assert len(allocator.alloc_extend(extend_num_tokens=4)) == 4
    assert told == [3, 4] and not hasattr(allocator, "alloc_decode")


def test_a_hierarchical_cache_on_cpu_reads_what_keep_on_cpu_sets(monkeypatch):
    """Red if SGLang takes memory, the bytes that it leaves free, or the kernel that
    copies slots from elsewhere: such a server would not start on a CPU."""
    from sglang.srt.mem_cache.pool_host import base as host_pool
    from sglang.srt.mem_cache.pool_host import common, mha, mla

    monkeypatch.setattr(host_pool, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 1 << 60)
    monkeypatch.setattr(common, "ALLOC_MEMORY_FUNCS", {})
    for pool in (mha, mla):
        monkeypatch.setattr(pool, "transfer_kv_direct", None, raising=False)
    assert host_pool.host_memory_budget_bytes(1) < 0
    pools.keep_on_cpu(torch.empty, max, 0)
    assert host_pool.host_memory_budget_bytes(1) > 0
    assert common.ALLOC_MEMORY_FUNCS["cpu"] is torch.empty
    assert mha.transfer_kv_direct is mla.transfer_kv_direct is max
    base = source_of("mem_cache/pool_host/base.py")
    assert "- HICACHE_HOST_MEMORY_RESERVE_BYTES" in base
    for pool in ("mha", "mla"):
        source = source_of(f"mem_cache/pool_host/{pool}.py")
        assert "alloc_func = ALLOC_MEMORY_FUNCS[" in source
        assert "transfer_kv_direct(\n" in source


def test_the_scheduler_reads_lengths_and_figures_where_we_leave_them():
    """Red if SGLang keeps the lengths of a batch in other fields (`set_lens`), or the
    counts that `correct_decode_stats` scales."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components import metrics_reporter

    names = {f.name for f in dataclasses.fields(ScheduleBatch)}
    assert {"seq_lens", "seq_lens_cpu", "seq_lens_sum"} <= names
    batch, lens = SimpleNamespace(), torch.tensor([2, 3])
    requests.set_lens(batch, lens.float(), lens)
    assert batch.seq_lens_cpu is lens and batch.seq_lens_sum == 5
    source = inspect.getsource(metrics_reporter)
    for name in ("num_correct_drafts", "num_forward_ct", "num_cap_tokens"):
        assert f"self.spec_{name} = 0" in source
