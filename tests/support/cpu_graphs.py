"""Captured graphs on a CPU: SGLang's own runners of decode steps and of prefills, over
a backend whose replay runs the captured closure again.

The closure reads the capture's static buffers and its outputs are those of the capture,
as on a GPU. Before a replay they hold NaN, so what is not written again is seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import patch

import torch

CAPTURE_BS = [1, 2, 4, 8, 12, 16, 24, 32]
CAPTURE_TOKENS = [4, 8, 16, 32, 64, 128, 256]


def leaves(value) -> list[torch.Tensor]:
    """The tensors of what a forward returned."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, list | tuple) else ()  # or a class of lists
    if isinstance(value, dict):
        parts = value.values()
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [t for part in parts for t in leaves(part)]


class ReplayBackend:
    """What SGLang's runner captures into (runner_backend)."""

    #: Replays of all runners, by role, kind of graph and captured size.
    counts: dict[tuple[str, str, int], int] = {}

    def __init__(self, runner, **_) -> None:
        self.runner, self.forwards, self.outputs = runner, {}, {}

    @contextlib.contextmanager
    def capture_session(self, stream):
        yield

    @contextlib.contextmanager
    def replay_session(self):
        yield

    def capture_one(self, key, forward, capture_inputs=None, post_warmup_hook=None):
        self.forwards[key], self.outputs[key] = forward, forward()

    def can_run(self, forward_batch, key) -> bool:
        return key in self.forwards

    def replay(self, key, static_forward_batch, **kwargs):
        held = leaves(self.outputs[key])
        for t in held:
            t.fill_(float("nan") if t.is_floating_point() else 0)
        found = leaves(self.forwards[key]())
        assert len(held) == len(found)
        for a, b in zip(held, found, strict=True):
            if a.data_ptr() != b.data_ptr():
                a.copy_(b)
        is_draft = self.runner.model_runner.is_draft_worker
        what = type(self.runner).__name__.removesuffix("CudaGraphRunner")
        place = ("draft" if is_draft else "target", what, key.size)
        self.counts[place] = self.counts.get(place, 0) + 1
        return self.outputs[key]

    def cleanup(self) -> None:
        return None


def prefill_backend(runner, **_):
    """A backend for graphs of prefills, which are broken at attention layers: these
    attend as the batch of the replay says. All sizes share the rows of one output."""
    from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend

    breakable = breakable_cuda_graph_backend.BreakableCudaGraphBackend

    class PrefillReplay(ReplayBackend, breakable):
        _shared_output_buffer = None
        replay_session = breakable.replay_session

        def capture_session(self, stream):
            return self.replay_session()

        def capture_one(self, key, forward, *_, **__):
            body = self.runner.layer_model.forward
            found = forward()
            if self._shared_output_buffer is None:  # the largest size is the first
                self._shared_output_buffer = self._alloc_full_buffer(found, key.size)
            self.outputs[key] = self._slice_output(self._shared_output_buffer, key.size)

            def run_body():
                context = "_prefill_forward_context"
                with (
                    patch.object(self.runner.layer_model, "forward", body),
                    patch.object(self.runner, context, contextlib.nullcontext),
                ):
                    return forward()

            self.forwards[key] = run_body

    return PrefillReplay(runner)


def install(*, poisons: bool = True, prefills: bool = False) -> None:
    """Have the runners of this process capture their graphs. Call it before graphs are
    initialised. poisons: whether forwards spoil the logits that all graphs
    share, as any of them may. prefills: whether those of a head are captured too."""
    import msgspec
    from sglang.srt.model_executor import graph_shared_output, model_runner
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as decode
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as prefill
    from sglang.srt.runtime_context import get_exec

    from sglang_parse.cpu.attention import ParseTorchAttnBackend as Attention
    from sglang_parse.drafting import head_graphs

    def out_graph(self, batch, in_capture=False):
        self.swa_out_cache_loc = None
        self._batch, self._rows, self._tiles = batch, None, {}

    Attention.init_cuda_graph_state = lambda self, max_bs, max_num_tokens: None
    Attention.get_cuda_graph_seq_len_fill_value = lambda self: 1
    Attention.init_forward_metadata_out_graph = out_graph
    Attention.init_forward_metadata_in_graph = lambda self, batch: None

    @contextlib.contextmanager
    def graph_capture(stream=None):
        yield SimpleNamespace(stream=None)

    runner = decode.DecodeCudaGraphRunner
    runner._record_in_graph_metadata_prep_done = lambda self: None
    runner._publish_read_done = lambda self, in_graph: None
    decode.resolve_decode_backend = ReplayBackend
    prefill.resolve_prefill_backend = prefill_backend
    for module in (decode, prefill):
        module.get_or_create_global_graph_capture_stream = lambda: None
        module.graph_capture = graph_capture
    shared = []

    def build(of):
        made = runner(of)
        return cuda_graph_setup.GraphCapture(
            runner=made, memory_phase="decode", memory_usage_gb=0, capture_time=0
        )

    without = cuda_graph_setup.capture_cuda_graphs

    def capture(*, model_runner, capture_decode_cuda_graph=True, **kwargs):
        config = get_exec().graph.cuda_graph_config
        config.decode.bs, config.prefill.bs = list(CAPTURE_BS), list(CAPTURE_TOKENS)
        if prefills:
            config.prefill.backend = "breakable"
        found = without(
            model_runner=model_runner, capture_decode_cuda_graph=False, **kwargs
        )
        if not shared:
            made = graph_shared_output.GraphSharedOutput(
                device=torch.device("cpu"), max_rows=64
            )
            shared.append(made)
        model_runner.graph_shared_output = shared[0]
        if not capture_decode_cuda_graph:
            return found
        return msgspec.structs.replace(found, decode=build(model_runner))

    cuda_graph_setup.capture_cuda_graphs = model_runner.capture_cuda_graphs = capture

    def capture_decode(*, model_runner):
        return build(model_runner)

    cuda_graph_setup.capture_decode_graph = capture_decode
    model_runner.capture_decode_graph = capture_decode
    forward = model_runner.ModelRunner._forward_raw

    def poisoned(self, batch, *args, **kwargs):
        for buffer in shared[0]._logits_buffers.values() if shared else ():
            buffer.fill_(float("nan"))
        return forward(self, batch, *args, **kwargs)

    if poisons:
        model_runner.ModelRunner._forward_raw = poisoned
    head_graphs.STEP_BACKEND = "parse_torch"
    # Decode graphs are not disabled, and those of prefills are breakable.
    head_graphs.check_cuda_graph_backend = lambda phase, backend: backend == "breakable"

    def capture_head(self):
        if prefills:
            get_exec().graph.cuda_graph_config.prefill.backend = "breakable"
            self._try("prefills", self._why_no_prefills(), self._capture_prefills)
        self._try("steps", self._why_no_steps(), self._capture_steps)

    head_graphs.HeadGraphs.capture = capture_head
