"""Runs verify passes by SGLang's captured CUDA graphs where these serve PARSE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_parse.sgl.compat.graph_changes import graphs_of_pass

logger = logging.getLogger(__name__)


class PassGraphs:
    """Runs verify passes by the prefill graphs of `runner`, the target's ModelRunner.

    Where there are none, or they do not serve PARSE, passes run without graphs, and the
    log has one line that says why. `--disable-cuda-graph` and
    `--cuda-graph-backend-prefill` are SGLang's own switches.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._is_told = False
        #: Passes that replayed a graph.
        self.num_served = 0

    @contextmanager
    def serve(self, batch: ForwardBatch) -> Iterator[None]:
        """For the forward of this verify pass inside the block."""
        graphs = self.runner.prefill_cuda_graph_runner
        refused = why_not(graphs)
        if refused and not self._is_told and self.runner.device != "cpu":
            self._is_told = True
            logger.info("PARSE: verify passes run without CUDA graphs: %s.", refused)
        if refused or not fits(graphs, batch):
            with graphs_of_pass(self.runner):
                yield
            return
        with graphs_of_pass(self.runner, graphs, num_sequences=batch.batch_size):
            self.num_served += 1
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


def without_graphs(runner: Any, forward: Callable[[], Any]) -> Any:
    """What `forward` returns where the runner has no graphs (`graphs_of_pass`)."""
    with graphs_of_pass(runner):
        return forward()
