"""Changes to the index buffers and plans of SGLang's attention backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import cycle
from types import SimpleNamespace
from typing import Any

from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor


def _part_of_two(backend: Any, name: str) -> Any:
    """Of two backends the one called `name`, else the backend itself.

    name: `prefill_backend` or `decode_backend`, as HybridAttnBackend has them
    (layers/attention/hybrid_attn_backend.py). FlashInfer's own backend has words under
    these names, which choose its kernels.
    """
    part = getattr(backend, name, None)
    return backend if part is None or isinstance(part, str) else part


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
def holds_pass(
    backend: Any,
    buffers: Sequence[IndexBuffer],
    *,
    num_sequences: int,
    table: Tensor | None = None,
) -> Iterator[None]:
    """Let the verify passes inside the block hold `num_sequences` sequences.

    table: [sequences, columns] int32, where the pass brings a slot table of its own.

    What: those of the attention backend's `buffers` that are too short are replaced
    inside the block; one that is missing or None belongs to another kind of model. Its
    `req_to_token_pool` shows `table`. Of two backends it is the one for prefills.
    Why: backends size their index buffers by requests, and some take a sequence's slots
    from its request's row alone. A verify pass has several sequences a request. The old
    buffers come back because captured decode graphs go on reading them.
    Where: layers/attention/flashinfer_backend.py, `kv_last_page_len`;
    layers/attention/triton_backend.py, `kv_indptr`, `qo_indptr` and
    `window_kv_indptr`; layers/attention/flashattention_backend.py and
    torch_native_backend.py, `req_to_token_pool`;
    layers/attention/hybrid_attn_backend.py, `prefill_backend`.
    Ends with: buffers that grow with the batch, and a field of ForwardBatch that holds
    the slots of its sequences.
    """
    backend = _part_of_two(backend, "prefill_backend")
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for one in buffers:
            owner = getattr(backend, one.owner) if one.owner else backend
            buffer: Tensor | None = getattr(owner, one.name, None)
            size = num_sequences + one.num_extra
            if buffer is not None and len(buffer) < size:
                replace(owner, one.name, buffer.new_full((size,), one.fill))
        if table is not None:
            own = SimpleNamespace(req_to_token=table)
            replace(backend, "req_to_token_pool", own)
        yield


def plan_plain_decode(runner: Any, *, shows_states: bool = False) -> None:
    """Have a runner capture ordinary decode steps as CUDA graphs.

    shows_states: whether its graphs show the hidden states of all rows.

    What: a ModelRunner loses its speculative algorithm; what it runs carries its own
    (`ForwardBatch.spec_algorithm`). The server's setting `return_hidden_states_mode` is
    `full` while graphs that show states are captured. Call it once the pools are
    allocated, before graphs are captured.
    Why: under a speculative algorithm SGLang captures the target's decode graph as a
    verify pass of one width for all, for which a registered algorithm has no input. It
    captures none for a draft model. A pass reads the target's hidden states, and a head
    those of prefills and plain steps; a graph without them refuses such a batch.
    Where: runner/decode_cuda_graph_runner.py, `__init__`, `get_spec_info` and
    `capture_hidden_mode`; runner/prefill_cuda_graph_runner.py; runner/base_runner.py.
    Ends with: a method of CustomSpecAlgo that says what is captured.
    """
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    if not shows_states:
        return
    capture = runner.init_cuda_graphs

    @wraps(capture)
    def capture_with_hidden_states(*args: Any, **kwargs: Any) -> None:
        with get_exec().features.override(return_hidden_states_mode="full"):
            capture(*args, **kwargs)

    runner.init_cuda_graphs = capture_with_hidden_states


def plan_buffers_in_turn(backend: Any) -> Callable[[], None]:
    """What makes an attention backend stage its next captured decode step in the other
    of two page-locked buffers. Call the result before each step.

    backend: of a runner whose graphs are captured; of two backends, the one for decode
    steps is changed. A backend without such buffers, as Triton's, is left alone.

    What: replaces `_pin_memory_int_workspace_buffer` of the wrappers of captured steps
    by turns. The second buffer serves all batch sizes.
    Why: the device copies a plan when it reaches the step. If the next step were
    planned before that, the first would attend by the wrong plan. SGLang plans once a
    round and then waits.
    Where: `decode_cuda_graph_metadata` of layers/attention/flashinfer_backend.py (a
    list of wrappers for each size), flashinfer_mla_backend.py (one wrapper) and
    flashattention_backend.py (tensors and records, which stage nothing);
    layers/attention/hybrid_attn_backend.py, `decode_backend`; outside SGLang,
    `fast_decode_plan` of FlashInfer.
    Ends with: a wrapper of FlashInfer that stages plans in turns itself.
    """
    name = "_pin_memory_int_workspace_buffer"
    steps = _part_of_two(backend, "decode_backend")
    second: dict[int, Tensor] = {}
    pairs = []
    for entry in getattr(steps, "decode_cuda_graph_metadata", {}).values():
        for i, wrapper in enumerate(entry if isinstance(entry, list) else [entry]):
            own: Tensor | None = getattr(wrapper, name, None)
            if own is None:
                continue
            if i not in second:
                second[i] = own.new_empty(own.shape, pin_memory=own.is_pinned())
            pairs.append((wrapper, cycle((second[i], own))))

    def turn() -> None:
        for wrapper, buffers in pairs:
            setattr(wrapper, name, next(buffers))

    return turn
