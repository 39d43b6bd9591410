"""Changes to which forwards replay SGLang's captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

GRAPH_RUNNERS = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")


@contextmanager
def without_graphs(runner: Any) -> Iterator[None]:
    """Run the forwards inside the block without captured CUDA graphs.

    What: both graph runners of a ModelRunner are None inside the block.
    Why: a captured graph has no room for the virtual sequences of a verify pass, nor
    for hidden states that it was not captured with.
    Where: model_executor/model_runner.py, `_forward_raw`;
    runner/decode_cuda_graph_runner.py, `_validate_capture_hidden_mode`.
    Ends with: an argument of `ModelRunner.forward` for an eager forward.
    """
    graphs = {name: getattr(runner, name) for name in GRAPH_RUNNERS}
    try:
        for name in GRAPH_RUNNERS:
            setattr(runner, name, None)
        yield
    finally:
        for name, graph in graphs.items():
            setattr(runner, name, graph)


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
    `get_spec_info` of SGLang's decode graphs calls `make_input`. Where the block
    raises, steps run eagerly.
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
