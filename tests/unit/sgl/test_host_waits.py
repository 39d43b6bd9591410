"""How often the host waits for the device in a round, and that no host memory is
overwritten before the device has read it: each trace looks at both."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.xgrammar_backend import (
    XGrammarGrammar,
    XGrammarGrammarBackend,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import sampling_from_probs_torch
from sglang.srt.managers import schedule_batch as schedule_batch_module
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoTokenizer
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from sglang_parse.drafting import draft_model, head_model
from sglang_parse.drafting.drafter import DrafterResources
from sglang_parse.drafting.head import FollowedRequest, HeadDrafter
from sglang_parse.drafting.head_model import HeadHint
from sglang_parse.drafting.model_drafter import ModelDrafter, ModelMemory
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.engine.failures import GuardedDrafters
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.segmenting import Segmenting
from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.result import build_result, emit
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl import graphs, readback, sampling, slots, upload
from sglang_parse.sgl.fast_paths import FastPaths
from sglang_parse.sgl.grammar import GrammarChain, mask_for_rows
from sglang_parse.sgl.slots import RoundSlots
from sglang_parse.verify.layout import PassRequest, build_verify_plan
from sglang_parse.verify.lm_head import LmHead
from sglang_parse.verify.model import TargetModel
from sglang_parse.verify.passes import TargetVerifier
from tests.support.counting import GREEDY, CountingDraft, CountingHead
from tests.support.device_trace import HostWaits
from tests.support.fake_engine import request_options

VOCAB, HIDDEN, SEQ_LEN, SUFFIX = 64, 8, 500, 24
#: The most that a round may wait, however many requests it has.
BUDGET = 40


@dataclasses.dataclass
class Sampling:
    """The fields and methods of SGLang's that rows are made from."""

    penalizer_orchestrator: Any = None
    acc_additive_penalties: Any = None
    acc_scaling_penalties: Any = None
    grammars: Any = None
    has_custom_logit_processor: bool = False
    vocab_size: int = VOCAB

    def __len__(self) -> int:
        return 0

    def filter_batch(self, index, rows) -> None: ...
    def apply_logits_bias(self, logits) -> None: ...


class Draft(CountingDraft):
    def _forward(self, batch, path):
        logits = torch.empty(len(batch.rows), VOCAB, device="cuda")
        return SimpleNamespace(next_token_logits=logits)


class Head(CountingHead):
    def _forward(self, batch, path=""):
        rows = len(batch.rows)
        logits = torch.empty(rows, VOCAB, device="cuda")
        hidden = torch.empty(rows, HIDDEN, device="cuda")
        return SimpleNamespace(next_token_logits=logits, hidden_states=hidden)


class Worker:
    """Plans attention as FlashInfer does (flashinfer/prefill.py, `plan`)."""

    def forward_batch_generation(self, *, batch, forward_batch, is_verify):
        spec, rows = forward_batch.spec_info, len(forward_batch.input_ids)
        _, kv_indptr, qo_indptr, _ = spec.generate_attn_arg_prefill(
            req_pool_indices=forward_batch.req_pool_indices
        )
        for array in (kv_indptr, qo_indptr, torch.ones(4, device="cuda")):
            array.to("cpu")
        output = LogitsProcessorOutput(
            next_token_logits=torch.empty(len(spec.logits_rows), VOCAB, device="cuda"),
            hidden_states=torch.empty(rows, HIDDEN, device="cuda"),
        )
        return SimpleNamespace(logits_output=output)


def make_verifier() -> TargetVerifier:
    def logits_processor(ids, hidden, head, metadata):
        logits = torch.empty(len(hidden), VOCAB, device="cuda")
        return SimpleNamespace(next_token_logits=logits)

    one = TargetVerifier.__new__(TargetVerifier)
    one.shows_features, one.spec_algorithm = False, None
    one.target_worker = Worker()
    one.runner = SimpleNamespace(
        prefill_attention_backend_str="flashinfer",
        attn_backend=SimpleNamespace(
            indices_updater_prefill=SimpleNamespace(kv_last_page_len=torch.ones(999))
        ),
        kv_index_translator=SimpleNamespace(bind_own_plan=lambda batch: None),
        model_config=SimpleNamespace(model_is_mrope=False),
        server_args=SimpleNamespace(ep_size=1),
        decode_cuda_graph_runner=None,
        prefill_cuda_graph_runner=None,
        device="cpu",
        sampler=lambda output, *_: output.next_token_logits.argmax(dim=-1),
    )
    one.lm_head, one.shown = LmHead(None, logits_processor), None
    one.pass_graphs, one.paths = graphs.PassGraphs(one.runner), FastPaths()
    return one


def make_round(num: int, config: ParseConfig) -> Round:
    requests = []
    for row in range(num):
        req = SimpleNamespace(
            origin_input_ids=[5] * SEQ_LEN,
            output_ids=[6],
            grammar=None,
            multimodal_inputs=None,
            vocab_size=VOCAB,
            kv=SimpleNamespace(kv_allocated_len=SEQ_LEN + 1),
            sampling_params=SimpleNamespace(
                max_new_tokens=400,
                stop_strs=None,
                stop_regex_strs=None,
                custom_params={},
            ),
        )
        state = RequestState(
            request_options(req, config),
            frozenset({3}),
            JudgePrompt((9,) * SUFFIX, ((0, 1),)),
            SimpleNamespace(record=lambda one: None, record_plain=lambda *told: None),
        )
        requests.append(RequestRound(req, state, row, SEQ_LEN, 6, output_len=1))
    batch = SimpleNamespace(
        reqs=[r.req for r in requests],
        req_pool_indices=torch.empty(num, dtype=torch.int64, device="cuda"),
        req_pool_indices_cpu=torch.arange(num),
        seq_lens=torch.empty(num, dtype=torch.int64, device="cuda"),
        sampling_info=Sampling(),
        tree_cache=SimpleNamespace(evictable_size=lambda: 0),
        device=torch.device("cuda"),
        return_logprob=False,
        return_hidden_states=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
    )
    return Round(batch, requests)


def make_engine(config: ParseConfig) -> tuple[RoundEngine, Any]:
    """With a head that `config` composes, or else with a draft model."""
    table = torch.empty(64, 4096, dtype=torch.int32, device="cuda")
    allocator = SimpleNamespace(
        size=1 << 16, available_size=lambda: 1 << 15, free=lambda slots: None
    )
    pool = RoundSlots(SimpleNamespace(req_to_token=table), allocator, max_rows=8192)
    ranks = SimpleNamespace(
        agree=lambda value: value, agree_all=lambda rows: [tuple(r) for r in rows]
    )
    verifier, drafter = make_verifier(), ModelDrafter(Draft(longest_extend=8192))
    if config.composes:
        verifier.shows_features, head = True, Head()
        head.check_room = lambda: None
        context = SimpleNamespace(ranks=ranks, config=config)
        drafter = HeadDrafter(head, config.eagle_steps, context)
    drafter.open(DrafterResources(pool, 1 << 16, None))
    engine = RoundEngine(
        target=TargetModel(verifier, pool),
        slots=pool,
        drafters=GuardedDrafters([drafter]),
        planner=RoundPlanner(config, ranks, pool, [drafter], context_len=4096),
        segmenting=Segmenting(config, ["a "] * VOCAB),
        ranks=ranks,
    )
    return engine, drafter


@pytest.fixture
def waits(monkeypatch) -> HostWaits:
    """Nothing here asks for a driver, or for SGLang's pools."""
    waits = HostWaits()
    monkeypatch.setattr(FakeTensor, "tolist", lambda one: waits.tolist(one))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    taken = {"dtype": torch.int64, "device": "cuda"}
    monkeypatch.setattr(upload, "page_locked", lambda held: held)
    monkeypatch.setattr(readback, "page_locked", torch.ones_like)
    monkeypatch.setattr(readback, "mark", lambda device: waits.event())
    monkeypatch.setattr(
        slots, "alloc_token_slots", lambda _, n: torch.empty(n, **taken)
    )
    monkeypatch.setattr(slots, "assign_req_to_token_pool_func", lambda *_: None)
    monkeypatch.setattr(slots, "get_alloc_reserve_per_decode", lambda: 1)
    monkeypatch.setattr(sampling, "agree_across_ranks", lambda: None)
    monkeypatch.setattr(draft_model, "draft_rows", lambda *_: GREEDY)
    for module in (draft_model, head_model):
        monkeypatch.setattr(module, "draft_tp_context", lambda _: nullcontext())
        monkeypatch.setattr(module, "draft_pp_context", nullcontext)
    return waits


def sampled_request(row: int) -> Any:
    """A request with a temperature and a bias, as SGLang's scheduler has it."""
    params = SamplingParams(temperature=0.7, top_p=0.9, logit_bias={str(row): 1.0})
    return SimpleNamespace(
        sampling_params=params,
        custom_logit_processor=None,
        return_logprob=False,
        return_hidden_states_mode=CaptureHiddenMode.NULL,
        return_sampling_mask=False,
        sampling_logprobs_mode=None,
        grammar=None,
        finished=lambda: row % 2 == 1,
    )


def schedule_batch(first: int, num: int) -> ScheduleBatch:
    """SGLang's batch of `num` requests, with the sampling that it prepares."""
    batch = ScheduleBatch(reqs=[sampled_request(first + i) for i in range(num)])
    batch.device, batch.spec_algorithm = "cuda", SpeculativeAlgorithm.NONE
    batch.model_config = SimpleNamespace(is_encoder_decoder=False)
    batch.req_pool_indices_cpu = torch.arange(first, first + num)
    batch.req_pool_indices = upload.upload(batch.req_pool_indices_cpu, "cuda")
    batch.seq_lens_cpu = torch.full((num,), SEQ_LEN)
    batch.seq_lens = upload.upload(batch.seq_lens_cpu, "cuda")
    batch.orig_seq_lens = batch.seq_lens.int()
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    return batch


@pytest.fixture
def sampled(monkeypatch):
    """SGLang's settings that sampling asks for; two ranks agree on tokens."""
    off = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        features=SimpleNamespace(
            enable_custom_logit_processor=False, enable_watermark=False
        ),
    )
    monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: off)
    for module in (sampling_batch_info, schedule_batch_module):
        monkeypatch.setattr(module, "is_pin_memory_available", lambda device: False)
    monkeypatch.setattr(sampling, "agree_across_ranks", lambda: [None])
    monkeypatch.setattr(draft_model, "draft_rows", sampling.draft_rows)


def drawn(output: Any, info: SamplingBatchInfo, *_: Any) -> torch.Tensor:
    """What SGLang's sampler does with a temperature, without FlashInfer's kernels."""
    assert info.grammars  # which has it agree
    probs = (output.next_token_logits / info.temperatures).softmax(dim=-1)
    return sampling_from_probs_torch(probs)


def hinted() -> FollowedRequest:
    """A request that the head has followed so far."""
    token = torch.empty((), dtype=torch.int64, device="cuda")
    hidden = torch.empty(HIDDEN, device="cuda")
    return FollowedRequest(hint=HeadHint(token, hidden, hidden[0]))


def judge(
    num: int,
    waits: HostWaits,
    *,
    is_sampled: bool = False,
    rule: Any = None,
    num_new: int = 0,
    **options: Any,
) -> HostWaits:
    """A round of `num` requests, its result included. Of these `num_new` have just
    joined, so that their drafts read the whole text; the others drafted before. rule:
    the grammar of all. options: of the server."""
    config = ParseConfig(segmenter="fixed:16", window=64, adaptive=False, **options)
    waits.counts.clear()
    with waits:
        engine, drafter = make_engine(config)
        round = make_round(num, config)
        if is_sampled:
            round.batch.sampling_info = schedule_batch(0, num).sampling_info
            drafter.model.runner.sampler = drawn
            engine.target.verifier.runner.sampler = drawn
        for r in round.requests[num_new:]:
            memory = ModelMemory(SEQ_LEN, SEQ_LEN)
            drafter._memory[r.state] = hinted() if config.composes else memory
        for r in round if rule is not None else ():
            r.grammar = GrammarChain(rule.copy(), VOCAB, "cuda")
        assert waits.total == 0
        engine.run(round)
        build_result(
            [emit([r]) for r in round],
            round,
            seq_lens=round.batch.seq_lens,
            host_lens=torch.full((num,), SEQ_LEN),
            return_logprob=False,
            return_hidden_states=False,
        )
    assert all(r.error is None for r in round), [r.error for r in round]
    assert all(r.draft.tokens for r in round)
    if config.mode == "semantic":
        assert all(len(r.boundaries) >= 2 for r in round)
    return waits


def test_a_judged_round_waits_seldom_and_never_for_each_request(waits):
    """Red if a stage of the round copies from ordinary memory, or reads the device back
    request by request."""
    counts = {num: dict(judge(num, waits).counts) for num in (1, 8, 32)}
    assert counts[1] == counts[8] == counts[32]
    assert 0 < sum(counts[32].values()) <= BUDGET, counts
    assert counts[32]["tolist"] >= 2, counts  # verdicts, samples


@pytest.mark.parametrize("is_sampled", [False, True])
def test_newcomers_in_a_judged_round_cost_no_wait_each(
    waits, monkeypatch, request, is_sampled
):
    """Red if a text that a draft model has yet to read makes the host wait for it."""
    if is_sampled:
        request.getfixturevalue("sampled")
    read, forward = [], Draft._forward

    def tell(self, batch, path):
        read.append(len(batch.input_ids))
        return forward(self, batch, path)

    monkeypatch.setattr(Draft, "_forward", tell)
    found = {}
    for num_new in (0, 1, 5):
        read.clear()
        done = judge(8, waits, num_new=num_new, is_sampled=is_sampled)
        found[num_new] = dict(done.counts)
        assert max(read) > SEQ_LEN * num_new * 0.9
    assert found[1] == found[5]
    assert sum(found[5].values()) <= sum(found[0].values()) + 4 <= BUDGET, found


def test_a_sampled_round_waits_as_seldom(waits, sampled):
    """Red if temperatures, biases, or the ranks' agreement on tokens make the host wait
    for each request or token, or mix the host's tensors with the device's."""
    counts = {num: dict(judge(num, waits, is_sampled=True).counts) for num in (1, 32)}
    assert counts[1] == counts[32]
    assert 0 < sum(counts[32].values()) <= BUDGET, counts


def test_a_round_with_a_head_waits_as_seldom(waits):
    """Red if a head's chain, or what it reads behind a pass, makes the host wait for
    each request."""
    options = {"mode": "exact", "compose": "eagle3", "eagle_model_path": "/head"}
    counts = {num: dict(judge(num, waits, **options).counts) for num in (1, 32)}
    assert counts[1] == counts[32]
    assert 0 < sum(counts[32].values()) <= BUDGET, counts


def made_of_one_letter() -> XGrammarGrammar:
    """A grammar that every token but the stop token meets."""
    tokenizer = ["a"] * VOCAB
    tokenizer[3] = "</s>"
    info = TokenizerInfo(tokenizer, stop_token_ids=[3])
    context = GrammarCompiler(info).compile_regex("a*")
    matcher = GrammarMatcher(context, max_rollback_tokens=200)
    return XGrammarGrammar(matcher, VOCAB, context, None, None)


def test_a_round_under_a_grammar_waits_for_no_request(waits, monkeypatch):
    """Red if masks of a grammar, of a draft's steps or of a pass, make the host wait
    for each request, or are overwritten before the device has them."""
    rule = made_of_one_letter()
    monkeypatch.setattr(type(rule), "apply_vocab_mask", lambda *_, **__: None)
    counts = {
        num: dict(judge(num, waits, rule=rule, mode="exact").counts) for num in (1, 8)
    }
    assert counts[1] == counts[8]
    assert 0 < sum(counts[8].values()) <= 2 * BUDGET, counts


class Steps:
    """Decode steps of the target, planned on the host alone as captured ones are."""

    def forward_batch_generation(self, *, batch, forward_batch, is_verify):
        rows = len(forward_batch.input_ids)
        logits = torch.empty(rows, VOCAB, device="cuda")
        output = LogitsProcessorOutput(next_token_logits=logits)
        return SimpleNamespace(logits_output=output)


@pytest.mark.parametrize("num", [1, 32])
def test_plain_steps_in_a_row_wait_for_none_that_runs(waits, monkeypatch, num):
    """Red if the device is idle between the steps of a plain round, because the host
    waits for the step before. It may read what is one step older, and the last at the
    end."""
    launched, waited = [], []

    def mark(device):
        step = len(launched)
        launched.append(step)
        wait = SimpleNamespace(synchronize=lambda: waited.append((step, len(launched))))
        return wait

    monkeypatch.setattr(readback, "mark", mark)
    with waits:
        engine, _ = make_engine(ParseConfig())
        engine.target.verifier.target_worker = Steps()
        round = make_round(num, ParseConfig())
        round.num_steps, round.batch.return_hidden_states = 4, False
        seen = []
        go_on = lambda steps, done: seen.append((len(steps), done)) or True  # noqa: E731
        assert len(engine.target.decode(round, go_on)) == 4
    assert not waits.counts
    assert seen == [(0, 1), (1, 2), (2, 3)]
    assert waited == [(0, 2), (1, 3), (2, 4), (3, 4)]


@pytest.mark.parametrize("num", [1, 32])
def test_a_short_pass_waits_for_nothing(waits, num):
    """Red if the host waits for the device before a pass that is a decode step."""
    with waits:
        engine, _ = make_engine(ParseConfig())
        engine.target.verifier.target_worker = Steps()
        round = make_round(num, ParseConfig())
        drafts = [
            PassRequest(SEQ_LEN, bonus_token=6, draft_tokens=[5, 5, 5]) for _ in round
        ]
        plan = build_verify_plan(drafts)
        output = engine.target.short_passes.run(round, plan)
        assert output.logits.shape == (4 * num, VOCAB) and output.has_all_logits
    assert not waits.counts


def test_a_wait_is_counted(waits):
    """Red if the trace sees none where there is one."""
    with waits:
        held = torch.ones(4)
        on_device = held.to("cuda")
        held.to("cuda", non_blocking=True)
        assert waits.total == 1
        bool(on_device.any())
        on_device.to("cpu")
        torch.repeat_interleave(on_device.long(), output_size=4)
        assert waits.total == 3


# -- Host memory that the device reads late ------------------------------------------


class Staging:
    """The mutant: one page-locked buffer for all uploads of a shape."""

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}

    def __call__(self, held: torch.Tensor) -> torch.Tensor:
        key = (held.shape, held.dtype)
        return self.buffers.setdefault(key, held.clone()).copy_(held)


def test_a_staging_buffer_that_is_used_again_is_found(waits, monkeypatch):
    """Red if the trace does not see that a round overwrites what the device has yet to
    read."""
    judge(1, waits)
    assert waits.num_uploads > 10
    monkeypatch.setattr(upload, "page_locked", Staging())
    with pytest.raises(AssertionError, match="was overwritten"):
        judge(1, waits)


def test_an_event_covers_what_was_launched_before_it(waits):
    """Red if waiting for one upload excuses a later one."""
    first, second = torch.ones(2), torch.ones(3)
    with pytest.raises(AssertionError, match=r"\[3\]'\]$"), waits:  # noqa: PT012
        first.to("cuda", non_blocking=True)
        event = waits.event()
        second.to("cuda", non_blocking=True)
        event.synchronize()
        first.zero_()
        second.zero_()
        waits.device_reads()


def test_sglang_prepares_a_batch_without_waiting(waits, sampled):
    """Red if newcomers that join, or requests that leave, make the host wait, or if
    SGLang uses the host memory of their sampling parameters again."""
    with waits:
        running, newcomers = schedule_batch(0, 4), schedule_batch(4, 3)
        running.merge_batch(newcomers)
        running.filter_batch()
        info = sampling.expand_rows(running.sampling_info, [0, 0, 3, 3, 3], "cuda")
    assert len(running.reqs) == 4 and len(info.temperatures) == 5
    assert waits.num_uploads >= 12 and not waits.counts, waits.counts


@pytest.mark.parametrize("is_reused", [False, True])
def test_masks_of_a_grammar_stay_until_the_device_has_them(
    waits, monkeypatch, is_reused
):
    """Red if a draft's next mask overwrites one that the device has yet to read; with
    one buffer for all masks it does, and that is found."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    backend = XGrammarGrammarBackend(tokenizer, len(tokenizer), model_eos_token_ids=[2])
    rule = backend.dispatch_regex("ab[cd]e")
    monkeypatch.setattr(type(rule), "apply_vocab_mask", lambda *_, **__: None)
    if is_reused:
        held = rule.allocate_vocab_mask(len(tokenizer), 1, "cuda")
        monkeypatch.setattr(
            type(rule), "allocate_vocab_mask", lambda *_: held.fill_(-1)
        )
    found = pytest.raises(AssertionError, match="was overwritten")
    with found if is_reused else nullcontext(), waits:
        chain = GrammarChain(rule, len(tokenizer), "cuda")
        logits = torch.empty(1, len(tokenizer), device="cuda")
        for token in tokenizer.encode("abd", add_special_tokens=False):
            chain.mask_next(logits)
            chain.advance(token)
        mask_for_rows([chain], [0], [1])
    assert waits.num_uploads >= 3 and not waits.counts
