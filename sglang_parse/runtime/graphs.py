"""SGLang's captured CUDA graphs, for forwards that it would run without them.

Like compat.py, whose rules hold here too: every function names the file of sglang
0.5.23 that makes it necessary, and tests/contract/test_graphs.py fails when that file
changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_exec

from sglang_parse.runtime.compat import without_graphs

logger = logging.getLogger(__name__)


def capture_hidden_states(runner: Any) -> None:
    """Have the target's graphs show the hidden states of all rows.

    runner: the target's ModelRunner. Call it before graphs are captured.

    What: the server's setting `return_hidden_states_mode` is `full` while the graphs
    are captured, and what it was afterwards.
    Why: a pass reads its hidden states, and an EAGLE-3 head those of prefills and plain
    steps. A graph that was captured without them refuses such a batch.
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


class PassGraphs:
    """Runs verify passes by the prefill graphs of `runner`, the target's ModelRunner.

    Where there are none, or they do not serve PARSE, passes run without graphs, and the
    log has one line that says why. `--disable-cuda-graph` and
    `--cuda-graph-backend-prefill` are SGLang's own switches.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._is_told = False

    @contextmanager
    def serve(self, batch: ForwardBatch) -> Iterator[None]:
        """For the forward of this verify pass inside the block."""
        graphs = self.runner.prefill_cuda_graph_runner
        refused = why_not(graphs)
        if refused and not self._is_told and self.runner.device != "cpu":
            self._is_told = True
            logger.info("PARSE: verify passes run without CUDA graphs: %s.", refused)
        if refused or not fits(graphs, batch):
            with without_graphs(self.runner):
                yield
            return
        with replay_pass(self.runner, graphs, num_sequences=batch.batch_size):
            yield


def why_not(graphs: Any) -> str:
    """Why prefill graphs cannot run verify passes at all, "" where they can.

    What is captured must be the body of the model alone, broken at attention layers:
    these then attend as the pass says, and read no lengths from the graph.
    """
    if not hasattr(graphs, "can_replay_locally"):
        return "prefill graphs are off"
    if graphs.prefill_backend_name != Backend.BREAKABLE:
        return f"prefill graphs are of kind {graphs.prefill_backend_name}"
    for flag, what in (
        ("use_captured_attn_metadata", "the attention backend captures its metadata"),
        ("enable_cp_bcg_capture", "prefills are context parallel"),
        ("is_multimodal", "the model reads more than tokens"),
        ("mamba_track_enabled", "the model keeps states beside its KV"),
        ("enable_lora", "LoRA is on"),
    ):
        if getattr(graphs, flag, False):
            return what
    return ""


def fits(graphs: Any, batch: ForwardBatch) -> bool:
    """Whether a captured size fits this pass, as SGLang asks it of a prefill."""
    lens = batch.seq_lens_cpu
    backend_can_run = graphs._backend_can_run_prefill_cuda_graph
    if backend_can_run is not None and not backend_can_run(batch):
        return False
    return bool(
        graphs.can_replay_locally(
            batch_size=batch.batch_size,
            num_tokens=len(batch.input_ids),
            input_embeds=None,
            replace_embeds=None,
            prefix_lens=batch.extend_prefix_lens_cpu,
            is_target_verify=False,
            capture_hidden_mode=batch.capture_hidden_mode,
            return_logprob=False,
            batch_max_context_len=int(lens.max()) + len(batch.input_ids),
        )
    )


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
