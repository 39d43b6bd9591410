"""Changes to which forwards replay SGLang's captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

GRAPH_RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")


@contextmanager
def graphs_of_pass(
    runner: Any, graphs: Any = None, *, num_sequences: int = 0
) -> Iterator[None]:
    """Have the forwards inside the block replay a prefill graph, whatever their mode.

    graphs: the runner's prefill graphs; None where the forwards run without any.

    What: both graph runners of a ModelRunner are None inside the block. If there are
    graphs, its prefill graphs take the batch, and their buffers of lengths are long
    enough for `num_sequences`.
    Why: a captured decode step has no room for the virtual sequences of a verify pass,
    nor for hidden states that it was not captured with. SGLang refuses passes in verify
    mode since its own spec inputs have no place in prefill graphs; ours is read by the
    attention layers alone, which run outside. The buffers have a place for each
    request, and a pass has several sequences a request. Nothing that is captured of a
    dense or sparse decoder reads them.
    Where: model_executor/model_runner.py, `_forward_raw`;
    runner/decode_cuda_graph_runner.py, `_validate_capture_hidden_mode`;
    runner/prefill_cuda_graph_runner.py, `can_replay_locally` and
    `_prefill_static_buffers`.
    Ends with: an argument of `ModelRunner.forward` for an eager forward, and prefill
    graphs that take a CustomSpecAlgo's pass.
    """
    with ExitStack() as stack:
        for name in GRAPH_RUNNERS:
            stack.callback(setattr, runner, name, getattr(runner, name))
            setattr(runner, name, None)
        if graphs is not None:
            runner.prefill_cuda_graph_runner = graphs
            stack.callback(graphs.__dict__.pop, "can_run_graph", None)
            graphs.can_run_graph = lambda batch: True
            buffers = graphs._prefill_static_buffers
            if any(len(b) < num_sequences for b in buffers.values()):
                stack.callback(setattr, graphs, "_prefill_static_buffers", buffers)
                graphs._prefill_static_buffers = {
                    name: b.new_zeros((num_sequences,)) for name, b in buffers.items()
                }
        yield


def pass_eager_inputs_through() -> None:
    """Have every forward without a graph read the batch's own tensors.

    What: SGLANG_EAGER_INPUT_NO_COPY is set in this process, once, at start-up.
    Why: the eager runner otherwise copies a batch into buffers with one row for each
    running request, and a verify pass has more sequences.
    Where: runner/eager_runner.py, `load_batch`, which alone reads the variable, at each
    forward; SGLang sets it itself for DeepSeek models on ROCm.
    Safe for other forwards: nothing else reads the copies, and without overlap no code
    writes to a batch while its forward runs. A scheduler process serves one model.
    Ends with: a field of ForwardBatch that says the same of one forward.
    """
    envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)


@contextmanager
def captured_for_head(
    runner: Any,
    algorithm: SpeculativeAlgorithm,
    make_input: Callable[[int, int], Any] | None = None,
) -> Iterator[None]:
    """Have a head's graphs captured inside the block, with the hidden states it reads.

    runner: the head's ModelRunner. algorithm: of prefills SGLang's that such a head
    belongs to, and of decode steps none. make_input: of steps; it takes the tokens of a
    captured step and the most of any, and gives its spec input.

    What: the runner has that speculative algorithm inside the block, and SGLang's
    `get_spec_info` of decode graphs calls `make_input`. Where the block raises, the
    forwards run eagerly.
    Why: only then do prefill graphs read the target's hidden states, from a buffer that
    a replay fills, and show the last one of each request. Under a speculative algorithm
    SGLang captures a verify pass for a step; without one, a step that reads no hidden
    states. Half-captured graphs would be replayed.
    Where: runner/prefill_cuda_graph_runner.py, `is_breakable_eagle_draft` and
    `static_draft_hidden_states`; runner/decode_cuda_graph_runner.py, `__init__`, which
    captures, and `get_spec_info`; model_executor/model_runner.py, `_forward_raw`, and
    `init_decode_cuda_graph`, which gives a runner without graphs its `eager_runner`.
    Ends with: a method of CustomSpecAlgo that says what a draft's forwards read.
    """
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )

    def with_states(graphs: Any, num_tokens: int) -> Any:
        assert make_input is not None
        return make_input(num_tokens, graphs.max_num_token)

    with ExitStack() as stack:
        stack.callback(setattr, runner, "spec_algorithm", runner.spec_algorithm)
        runner.spec_algorithm = algorithm
        if make_input is not None:
            kept = DecodeCudaGraphRunner.get_spec_info
            stack.callback(setattr, DecodeCudaGraphRunner, "get_spec_info", kept)
            DecodeCudaGraphRunner.get_spec_info = with_states
        try:
            yield
        except Exception:
            if make_input is None:
                runner.prefill_cuda_graph_runner = None
            else:
                runner.decode_cuda_graph_runner = runner.eager_runner
            raise


@contextmanager
def shown_by_steps() -> Iterator[None]:
    """Have decode steps that are captured inside the block show hidden states.

    What: SGLang's `get_spec_info` of decode graphs also sets what these capture.
    Why: for a model that drafts SGLang captures steps without hidden states, and none
    of its own algorithms has a head that reads those of a draft.
    Where: runner/base_runner.py, `return_hidden_states_mode`;
    runner/decode_cuda_graph_runner.py, which asks for the spec input of each size
    before it captures, and replays a graph that captures more than a batch wants.
    Ends with: an argument of a runner that says what its steps show.
    """
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )

    kept = DecodeCudaGraphRunner.get_spec_info

    def show(graphs: Any, num_tokens: int) -> Any:
        graphs.capture_hidden_mode = CaptureHiddenMode.LAST
        return kept(graphs, num_tokens)

    DecodeCudaGraphRunner.get_spec_info = show
    try:
        yield
    finally:
        DecodeCudaGraphRunner.get_spec_info = kept
