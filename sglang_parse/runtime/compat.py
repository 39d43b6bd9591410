"""Every change that PARSE makes to an object of SGLang while it runs, one a function.

Hooks, which replace functions before SGLang starts, are in integration/hooks.py. Each
function here names the file of sglang 0.5.23 that makes it necessary and what would end
the need. tests/contract/test_compat.py and test_graphs.py fail when that file changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    configure_aux_hidden_state_capture,
)
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from sglang_parse.runtime.protocols import SchedulerRequest

GRAPH_RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")


@dataclass(frozen=True)
class IndexBuffer:
    """An integer buffer that an attention backend sizes by requests."""

    #: Attribute of the backend that holds the buffer; "" for the backend itself.
    owner: str
    #: Attribute of the owner that is the buffer.
    name: str
    #: Entries beyond one for each sequence: 1 for running offsets.
    num_extra: int = 0
    #: What every entry holds before the backend writes it.
    fill: int = 0


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Run the forwards inside the block without captured CUDA graphs.

    What: both graph runners of a ModelRunner are None inside the block.
    Why: a captured graph has no room for the virtual sequences of a verify pass, nor
    for hidden states that it was not captured with.
    Where: model_executor/model_runner.py, `_forward_raw`;
    runner/decode_cuda_graph_runner.py, `_validate_capture_hidden_mode`.
    Ends with: an argument of `ModelRunner.forward` that asks for an eager forward.
    """
    graphs = {name: getattr(runner, name) for name in GRAPH_RUNNERS}
    try:
        for name in GRAPH_RUNNERS:
            setattr(runner, name, None)
        yield
    finally:
        for name, graph in graphs.items():
            setattr(runner, name, graph)


@contextmanager
def room_for(
    backend: Any, buffers: Sequence[IndexBuffer], *, num_sequences: int
) -> Iterator[None]:
    """Let the verify passes inside the block hold `num_sequences` sequences.

    What: those of the attention backend's `buffers` that are too short are replaced
    inside the block. One that is missing or None belongs to another kind of model. Of
    two backends it is the one for prefills.
    Why: backends size their index buffers by requests, and a verify pass has several
    sequences a request. The old buffers come back because captured decode graphs go on
    reading them.
    Where: layers/attention/flashinfer_backend.py, `kv_last_page_len`;
    layers/attention/triton_backend.py, `kv_indptr`, `qo_indptr` and
    `window_kv_indptr`; layers/attention/hybrid_attn_backend.py, `prefill_backend`.
    Ends with: buffers that grow with the batch.
    """
    replaced = []
    backend = getattr(backend, "prefill_backend", backend)
    try:
        for one in buffers:
            owner = getattr(backend, one.owner) if one.owner else backend
            buffer: Tensor | None = getattr(owner, one.name, None)
            size = num_sequences + one.num_extra
            if buffer is not None and len(buffer) < size:
                replaced.append((owner, one.name, buffer))
                setattr(owner, one.name, buffer.new_full((size,), one.fill))
        yield
    finally:
        for owner, name, buffer in replaced:
            setattr(owner, name, buffer)


@contextmanager
def reads_rows_of(backend: Any, table: Tensor | None) -> Iterator[None]:
    """Let the verify passes inside the block find their slots in a table of their own.

    table: [sequences, columns] int32, None where the pass has none.

    What: the attention backend's `req_to_token_pool` shows `table` inside the block. Of
    two backends it is the one for prefills.
    Why: some backends take a sequence's slots from its row of req_to_token alone, and
    the rows of that pool belong to requests.
    Where: layers/attention/flashattention_backend.py and torch_native_backend.py,
    `req_to_token_pool`; layers/attention/hybrid_attn_backend.py, `prefill_backend`.
    Ends with: a field of ForwardBatch that holds the slots of its sequences.
    """
    if table is None:
        yield
        return
    backend = getattr(backend, "prefill_backend", backend)
    pool = backend.req_to_token_pool
    try:
        backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
        yield
    finally:
        backend.req_to_token_pool = pool


def pass_eager_inputs_through() -> None:
    """Have every forward without a graph read the batch's own tensors.

    What: SGLANG_EAGER_INPUT_NO_COPY is set in this process, once, at start-up.
    Why: the eager runner otherwise copies a batch into buffers with one row for each
    running request, and a verify pass has more sequences.
    Where: runner/eager_runner.py, `load_batch`, which alone reads the variable, at each
    forward; SGLang sets it itself for DeepSeek models on ROCm.
    Safe for other forwards: nothing else reads the copies, and without overlap nobody
    writes to a batch while its forward runs. A scheduler process serves one model.
    Ends with: a field of ForwardBatch that says the same of one forward.
    """
    envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)


def wait_in_gathers(logits_processor: Any) -> None:
    """Let tensor-parallel ranks wait for each other before they gather logits.

    What: the entry barrier of the processor's gatherer is switched on.
    Why: SGLang leaves the barrier out, which is safe where a forward lies between two
    gathers into the same buffer. `TargetVerifier.logits_at` gathers right after a pass.
    Where: distributed/device_communicators/triton_symm_mem_ag.py,
    `MultimemAllGatherer`.
    Ends with: a gather that may follow another one.
    """
    gatherer = getattr(logits_processor, "_logits_gatherer", None)
    if gatherer is not None:
        gatherer._skip_entry_sync = False


def plan_plain_decode(runner: Any) -> None:
    """Have a runner capture ordinary decode steps as CUDA graphs.

    What: a ModelRunner loses its speculative algorithm; what it runs carries its own
    (`ForwardBatch.spec_algorithm`). Call it once the pools are allocated, before graphs
    are captured.
    Why: under a speculative algorithm SGLang captures the target's decode graph as a
    verify pass of one width for all, for which a registered algorithm has no input. It
    captures none for a draft model.
    Where: runner/decode_cuda_graph_runner.py, `__init__` and `get_spec_info`.
    Ends with: a method of CustomSpecAlgo that says what is captured.
    """
    runner.spec_algorithm = SpeculativeAlgorithm.NONE


def capture_features(target: Any, head_config: Any, flag: str) -> None:
    """Make the target return the hidden states that an EAGLE-3 head was trained on.

    target: its ModelRunner. head_config: the head's Hugging Face config, which may name
    the layers. Call it before graphs are captured. Raises ValueError naming `flag`.

    What: layers of the target's model are marked, and its logits processor keeps the
    final hidden states beside theirs, for the LM head.
    Why: SGLang does both for its own algorithms only.
    Where: model_runner_components/attention_backend_setup.py,
    `configure_aux_hidden_state_capture`; layers/logits_processor.py,
    `keep_last_hidden_states`.
    Ends with: a method of CustomSpecAlgo that asks for hidden states.
    """
    model = target.model
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise ValueError(
            f"{flag}: {type(model).__name__} cannot show an EAGLE-3 head its hidden "
            "states; choose a target that SGLang serves with EAGLE3."
        )
    eagle = getattr(head_config, "eagle_config", None) or {}
    configure_aux_hidden_state_capture(
        model=model,
        eagle_use_aux_hidden_state=True,
        eagle_aux_hidden_state_layer_ids=eagle.get("eagle_aux_hidden_state_layer_ids"),
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    model.logits_processor.keep_last_hidden_states = True


@dataclass(frozen=True)
class ShownLayers:
    """Hidden states that the target shows: in front of each of these layers, rising."""

    layers: tuple[int, ...]
    #: Those that an EAGLE-3 head reads; empty without a head.
    head: tuple[int, ...]
    hidden_size: int

    def columns(self, layers: Sequence[int]) -> list[int]:
        """Columns of what is shown that hold these layers."""
        size = self.hidden_size
        starts = [self.layers.index(one) * size for one in layers]
        return [start + k for start in starts for k in range(size)]


def show_layers(target: Any, layers: Sequence[int], flag: str) -> ShownLayers:
    """Make the target return the hidden states in front of more layers.

    target: its ModelRunner, behind `capture_features` if there is a head. layers: from
    1 to one below their number. Call it before graphs are captured. Raises ValueError
    naming `flag`.

    What: the layers in `model.layers_to_capture` become those of the head and these;
    they are shown by rising number.
    Why: a probe reads other layers than a head, and SGLang marks a head's only.
    Where: models/llama.py, `set_eagle3_layers_to_capture`, which adds one to each
    number; layers/logits_processor.py, `keep_last_hidden_states`.
    Ends with: a method of CustomSpecAlgo that asks for hidden states.
    """
    model = target.model
    size: int = target.model_config.hidden_size
    head = tuple(sorted(getattr(model.model, "layers_to_capture", None) or ()))
    wanted = tuple(sorted({*head, *layers}))
    if hasattr(model, "set_eagle3_layers_to_capture"):
        model.set_eagle3_layers_to_capture([layer - 1 for layer in wanted])
    shown = getattr(model.model, "layers_to_capture", None)
    if tuple(shown or ()) != wanted:
        raise ValueError(
            f"{flag}: {type(model).__name__} cannot show the hidden states of layers "
            f"{', '.join(map(str, layers))}; choose a target that SGLang serves with "
            "EAGLE3."
        )
    model.logits_processor.keep_last_hidden_states = True
    return ShownLayers(wanted, head, size)


@dataclass(frozen=True)
class States:
    """Hidden states of a forward, [tokens, width] each."""

    final: Tensor
    #: Of the layers that the target shows (`capture_features`, `show_layers`), side by
    #: side; None where it shows none.
    layers: Tensor | None

    @classmethod
    def of(cls, output: LogitsProcessorOutput) -> States:
        """Those of a forward that captures all. With layers shown, SGLang puts the
        final ones elsewhere."""
        found, final = output.hidden_states, output.last_hidden_states
        return cls(found, None) if final is None else cls(final, found)


def take_states(output: LogitsProcessorOutput, rows: Tensor | None) -> States:
    """The hidden states of a prefill that captures all, taken out of its output.

    rows: [n] int64 tokens whose final hidden states the scheduler is to see, None for
    all.

    What: the final hidden states, [n, hidden], stand where SGLang expects them.
    Why: with layers shown, `hidden_states` holds those, and the scheduler sends
    `hidden_states` to clients that ask for them.
    Where: layers/logits_processor.py, `_get_last_hidden_states_to_store`.
    Ends with: a field of its own for the layers.
    """
    states = States.of(output)
    output.hidden_states = states.final if rows is None else states.final[rows]
    return states


def set_allocated_len(req: SchedulerRequest, num_columns: int) -> None:
    """Tell SGLang how many columns of a request's row hold slots of that request.

    What: writes `Req.kv.kv_allocated_len`.
    Why: PARSE takes and frees slots inside a round. By this length SGLang frees the
    slots of a finished request and reserves those of its next step.
    Where: mem_cache/allocation.py, `alloc_for_spec_decode`; mem_cache/common.py,
    `release_kv_cache`.
    Ends with: functions that grow and shrink one request's row.
    """
    req.kv.kv_allocated_len = num_columns


def tell_of_slots(allocator: Any, note: Callable[[Tensor], None]) -> None:
    """Have `note` told of all slots that are taken from a pool.

    What: the allocator's functions that take slots tell of them.
    Why: a hierarchical cache brings KV back into slots that no batch names as its own,
    and what a drafter knows of those slots is of the tokens before.
    Where: mem_cache/hybrid_cache/hybrid_cache_controller.py, `load`.
    Ends with: a call of the speculative worker for prefixes that are brought back.
    """

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def alloc(*args: Any, **kwargs: Any) -> Any:
            slots = original(*args, **kwargs)
            if slots is not None:
                note(slots)
            return slots

        return alloc

    for name in ("alloc", "alloc_extend", "alloc_decode"):
        original = getattr(allocator, name, None)
        if original is not None:
            setattr(allocator, name, telling(original))


def keep_on_cpu(
    module: str,
    allocate: Callable[..., Tensor],
    copy: Callable[..., None],
    reserve: int,
) -> None:
    """Let a hierarchical cache keep its prompts beside a model on the CPU.

    What: host pools take memory by `allocate`, leave `reserve` bytes free, and those of
    a module, by its name, copy slots by `copy`.
    Why: they make memory known to a GPU, copy with its kernel, and leave 10 GiB to a
    host that has other work.
    Where: mem_cache/pool_host/common.py, `alloc_with_host_register`;
    mem_cache/pool_host/base.py, `host_memory_budget_bytes`;
    mem_cache/pool_host/mha.py, `load_to_device_per_layer`.
    Ends with: a host pool for platforms without a device of their own.
    """
    from sglang.srt.mem_cache.pool_host import base, common

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = reserve
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    setattr(sys.modules[module], "transfer_kv_direct", copy)  # noqa: B010


def abort(
    req: SchedulerRequest, message: str, *, status: HTTPStatus, err_type: str
) -> None:
    """End a request with an HTTP error at the end of this step.

    message: one sentence for the sender. err_type: SGLang's name of the kind of error.

    What: writes `Req.to_finish`, as SGLang's own aborts do.
    Why: a request may turn out to be impossible after the scheduler has admitted it,
    and SGLang lets registered algorithms check requests nowhere.
    Where: managers/schedule_batch.py, `Req.update_finish_state`.
    Ends with: a method of CustomSpecAlgo that checks a request.
    """
    req.to_finish = FINISH_ABORT(message, status_code=status, err_type=err_type)


@contextmanager
def ends_at(req: SchedulerRequest) -> Iterator[Callable[[int], None]]:
    """Let SGLang look for stops behind earlier tokens of an answer.

    Yields what shows the first so many tokens, and no end that was found before.

    What: `Req.output_ids` is a copy of its beginning inside the block;
    `Req.finished_reason` and `Req.finished_len` are cleared with each look.
    Why: SGLang looks for the stops of all tokens of a step at once, and finds others
    than token by token (integration/stops.py).
    Where: managers/schedule_batch.py, `Req._check_str_based_finish`.
    Ends with: a check of stops that takes the tokens of a step one by one.
    """
    tokens = req.output_ids

    def show(num_tokens: int) -> None:
        req.output_ids = tokens[:num_tokens]
        req.finished_reason = req.finished_len = None

    try:
        yield show
    finally:
        req.output_ids = tokens


def serve_plainly(req: SchedulerRequest) -> None:
    """Serve a request one token at a time, whatever it asks of PARSE.

    What: replaces its `custom_params`.
    Why: a request whose options nobody could check ends with an error at the end of
    this step, and until then it is part of the batch.
    Where: sampling/sampling_params.py, `SamplingParams.custom_params`.
    Ends with: a method of CustomSpecAlgo that checks a request.
    """
    req.sampling_params.custom_params = {"parse_mode": "off"}


def hold(req: SchedulerRequest) -> None:
    """Let a request that has its only token run on without output (`release`).

    What: raises the request's limit by one and takes its other stops away.
    Why: a text that is judged alone may need passes in several steps, and SGLang ends
    a request after any step in which it finds a stop.
    Where: managers/schedule_batch.py, `Req.update_finish_state`.
    Ends with: a flag of Req that keeps it running.
    """
    params = req.sampling_params
    params.max_new_tokens = 2
    params.ignore_eos = True
    params.stop_strs, params.stop_regex_strs = [], []


def release(req: SchedulerRequest) -> None:
    """End a request that was held, at its one token.

    What: puts the limit of one token back.
    Why: the verdicts of its text are complete (`hold`).
    Where: managers/schedule_batch.py, `Req.update_finish_state`.
    Ends with: a flag of Req that keeps it running.
    """
    req.sampling_params.max_new_tokens = 1


def emits_nothing(req: SchedulerRequest) -> None:
    """Prepare a request for a step in which it gets no token.

    What: moves the request's counts of right drafts by one beforehand, and makes sure
    that the last bin of its histogram exists.
    Why: SGLang takes the number of tokens less one for drafts that were right, which is
    -1 in such a step.
    Where: scheduler_components/batch_result_processor.py, `_resolve_spec_v2_tokens`.
    Ends with: support of an accepted length of 0.
    """
    histogram = req.spec_correct_drafts_histogram
    if not histogram:
        histogram.append(0)
    histogram[-1] -= 1
    req.spec_num_correct_drafts += 1


def emits_undrafted(req: SchedulerRequest, num_tokens: int) -> None:
    """Prepare a request for a result whose tokens the target wrote one by one.

    What: moves its counts of passes and of right drafts beforehand by what SGLang takes
    for one pass with so many tokens.
    Why: SGLang takes all tokens of a result but one for drafts that were right.
    Where: scheduler_components/batch_result_processor.py, `_resolve_spec_v2_tokens`.
    Ends with: a result that says how many of its tokens were drafted.
    """
    more = num_tokens - 1
    histogram = req.spec_correct_drafts_histogram
    histogram += [0] * (num_tokens - len(histogram))
    histogram[0] += num_tokens
    histogram[more] -= 1
    req.spec_verify_ct += more
    req.spec_num_correct_drafts -= more


def capture_hidden_states(runner: Any) -> None:
    """Have the target's graphs show the hidden states of all rows.

    runner: the target's ModelRunner. Call it before graphs are captured.

    What: the server's setting `return_hidden_states_mode` is `full` while the graphs
    are captured, and what it was afterwards.
    Why: a pass reads its hidden states, and a head those of prefills and plain steps.
    A graph that was captured without them refuses such a batch.
    Where: runner/base_runner.py, `BaseRunner.__init__`;
    runner/prefill_cuda_graph_runner.py and runner/decode_cuda_graph_runner.py,
    `capture_hidden_mode`.
    Ends with: a method of CustomSpecAlgo that says what graphs have to show.
    """
    capture = runner.init_cuda_graphs

    @wraps(capture)
    def capture_with_hidden_states(*args: Any, **kwargs: Any) -> None:
        with get_exec().features.override(return_hidden_states_mode="full"):
            capture(*args, **kwargs)

    runner.init_cuda_graphs = capture_with_hidden_states


def hide_media(model_config: Any, *, images: bool) -> None:
    """Have a server say that its model reads no audio and, unless `images`, no images.

    model_config: of SGLang's TokenizerManager.

    What: clears `is_audio_understandable_model` and `is_image_understandable_model`.
    Why: SGLang warms a server up with an image if its model is said to read images,
    and ends it if that request fails. PARSE refuses such requests of most families.
    Where: entrypoints/http_server.py, `_execute_server_warmup`;
    configs/model_config.py, `ModelConfig`.
    Ends with: a warm-up that a plugin may choose.
    """
    model_config.is_audio_understandable_model = False
    if not images:
        model_config.is_image_understandable_model = False


@contextmanager
def taken_for_triton(name: str) -> Iterator[None]:
    """Let SGLang take the attention backend `name` for Triton inside the block.

    What: replaces `attention_backends_of` of the module that checks backends by name.
    Why: the checks of single models list the backends that can serve sliding windows
    and sinks. Ours can, as Triton can, and no plugin may add to the lists.
    Where: arg_groups/model_hook.py, `handle_model_specific_adjustments`.
    Ends with: a list of backends that plugins may add to.
    """
    from sglang.srt.arg_groups import model_hook

    asked = model_hook.attention_backends_of

    def answer(view: Any) -> tuple[str, ...]:
        return tuple("triton" if found == name else found for found in asked(view))

    model_hook.attention_backends_of = answer
    try:
        yield
    finally:
        model_hook.attention_backends_of = asked


@contextmanager
def built_on_cpu() -> Iterator[None]:
    """Let a model that asks torch for its current device get the CPU.

    What: replaces `torch.get_device_module` inside the block.
    Why: a torch that was built for CUDA answers with CUDA where there is no GPU.
    Where: models/qwen3_next.py and models/qwen3_5.py, `norm`.
    Ends with: layers that take SGLang's device.
    """
    asked = torch.get_device_module

    def answer(device: Any = None) -> Any:
        return asked("cpu" if device is None else device)

    torch.get_device_module = answer  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.get_device_module = asked


@contextmanager
def replay_pass(runner: Any, graphs: Any, *, num_sequences: int) -> Iterator[None]:
    """Have the forwards inside the block replay a prefill graph, whatever their mode.

    What: the runner's decode graphs are out of the way inside the block, its prefill
    graphs take the batch, and their buffers of lengths are long enough.
    Why: SGLang refuses passes in verify mode since its own spec inputs have no place in
    these graphs; ours is read by the attention layers alone, which run outside. The
    buffers have a place for each request, and a pass has several sequences a request.
    Nothing that is captured of a dense or sparse decoder reads them.
    Where: runner/prefill_cuda_graph_runner.py, `can_replay_locally` and
    `_prefill_static_buffers`; model_executor/model_runner.py, `_forward_raw`.
    Ends with: prefill graphs that take a CustomSpecAlgo's pass.
    """
    with ExitStack() as stack:
        decode = runner.decode_cuda_graph_runner
        stack.callback(setattr, runner, "decode_cuda_graph_runner", decode)
        runner.decode_cuda_graph_runner = None
        stack.callback(graphs.__dict__.pop, "can_run_graph", None)
        graphs.can_run_graph = lambda batch: True
        buffers = graphs._prefill_static_buffers
        if any(len(b) < num_sequences for b in buffers.values()):
            stack.callback(setattr, graphs, "_prefill_static_buffers", buffers)
            graphs._prefill_static_buffers = {
                name: b.new_zeros((num_sequences,)) for name, b in buffers.items()
            }
        yield


@contextmanager
def waits_for_no_gpu(device: str) -> Iterator[None]:
    """Let models of heads take the target's weights inside the block on a CPU too.

    device: of the models.

    What: `torch.cuda.synchronize` does nothing inside the block on a CPU.
    Why: they wait there for a GPU, whatever the device.
    Where: models/deepseek_v2.py, glm4_moe.py and qwen3_next.py, `set_embed_and_head`.
    Ends with: models that ask SGLang's platform to wait, as models/llama.py does.
    """
    wait = torch.cuda.synchronize
    if device == "cpu":
        torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = wait


@contextmanager
def capture_head_prefills(runner: Any, algorithm: str) -> Iterator[None]:
    """Have a head's prefill graphs captured inside the block as those of SGLang's own.

    runner: the head's ModelRunner. algorithm: SGLang's that such a head belongs to.

    What: its speculative algorithm is that one inside the block. Where the block
    raises, the runner has no prefill graphs.
    Why: only then do the graphs read the target's hidden states, from a buffer that a
    replay fills, and show the last one of each request. Half-captured graphs would be
    replayed.
    Where: runner/prefill_cuda_graph_runner.py, `is_breakable_eagle_draft` and
    `static_draft_hidden_states`; model_executor/model_runner.py, `_forward_raw`.
    Ends with: a method of CustomSpecAlgo that says what a draft's prefill reads.
    """
    before = runner.spec_algorithm
    runner.spec_algorithm = SpeculativeAlgorithm[algorithm]
    try:
        yield
    except Exception:
        runner.prefill_cuda_graph_runner = None
        raise
    finally:
        runner.spec_algorithm = before


@contextmanager
def capture_head_steps(
    runner: Any, make_input: Callable[[int, int], Any]
) -> Iterator[None]:
    """Have a head's decode steps captured inside the block, with its hidden states.

    runner: the head's ModelRunner. make_input: takes the tokens of a captured step and
    the most of any, and gives its spec input.

    What: the runner has no speculative algorithm inside the block, and
    `get_spec_info` of SGLang's decode graphs asks `make_input`. Where the block raises,
    steps run eagerly.
    Why: under a speculative algorithm SGLang captures a verify pass; without one, a
    step that reads no hidden states. Half-captured graphs would be replayed.
    Where: runner/decode_cuda_graph_runner.py, `__init__`, which captures, and
    `get_spec_info`; model_executor/model_runner.py, `init_decode_cuda_graph`, which
    gives a runner without graphs its `eager_runner`.
    Ends with: a method of CustomSpecAlgo that says what a draft's step reads.
    """
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )

    algorithm, get_spec_info = (
        runner.spec_algorithm,
        DecodeCudaGraphRunner.get_spec_info,
    )

    def with_states(graphs: Any, num_tokens: int) -> Any:
        return make_input(num_tokens, graphs.max_num_token)

    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    DecodeCudaGraphRunner.get_spec_info = with_states
    try:
        yield
    except Exception:
        runner.decode_cuda_graph_runner = runner.eager_runner
        raise
    finally:
        DecodeCudaGraphRunner.get_spec_info = get_spec_info
        runner.spec_algorithm = algorithm


def plan_buffers_in_turn(backend: Any) -> Callable[[], None]:
    """What makes an attention backend stage its next captured decode step in the other
    of two page-locked buffers. Call the result before each step.

    backend: of a runner whose graphs are captured. Nothing happens with one that has no
    such buffers, as Triton's. Of two backends it is the one for decode steps.

    What: replaces `_pin_memory_int_workspace_buffer` of the wrappers of captured steps
    by turns. The second buffer serves all batch sizes.
    Why: the device copies a plan when its turn comes. Planned again before that, a step
    would attend by the plan of a later one; SGLang plans once a round and then waits.
    Where: layers/attention/flashinfer_backend.py, `decode_cuda_graph_metadata`;
    layers/attention/hybrid_attn_backend.py, `decode_backend`;
    outside SGLang, `fast_decode_plan` of FlashInfer.
    Ends with: a wrapper of FlashInfer that stages plans in turns itself.
    """
    name = "_pin_memory_int_workspace_buffer"
    steps = getattr(backend, "decode_backend", backend)
    captured = getattr(steps, "decode_cuda_graph_metadata", {}).values()
    second: dict[int, Tensor] = {}
    pairs = []
    for wrappers in captured:
        for i, wrapper in enumerate(wrappers):
            own: Tensor = getattr(wrapper, name)
            if i not in second:
                second[i] = own.new_empty(own.shape, pin_memory=own.is_pinned())
            pairs.append((wrapper, cycle((second[i], own))))

    def turn() -> None:
        for wrapper, buffers in pairs:
            setattr(wrapper, name, next(buffers))

    return turn
