"""CUDA graphs of a head: its prefills and its steps.

A prefill graph is the one that SGLang captures for a head of its own. A step is a
captured decode step that reads its hidden states from a buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import (
    SpecInput,
    SpecInputType,
    SpeculativeAlgorithm,
)
from torch import Tensor

from sglang_parse.options.table import EAGLE3, MTP
from sglang_parse.sgl.compat.graph_changes import (
    captured_for_head,
)

logger = logging.getLogger(__name__)

STEP_BACKEND = "flashinfer"
# Under whose name SGLang captures prefills of such a head.
ALGORITHMS = {EAGLE3: "EAGLE3", MTP: "EAGLE"}


@dataclass
class HeadInput(SpecInput):
    """What the head's forward reads besides tokens: [tokens, width] hidden states, the
    target's (as wide as the head asks) or the head's own of the step before.

    A dataclass, as SGLang replaces the states when it replays a prefill.
    """

    hidden_states: Tensor
    # Attention is planned from the request's row, not from SGLang's tree buffers.
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.capture_hidden_mode = CaptureHiddenMode.LAST


class HeadGraphs:
    """Captures the head's forwards and loads what a captured step reads.

    Where nothing can be captured the head runs without graphs, and the log has one line
    that says why. SGLang's own switches of its graphs hold for these too.
    """

    def __init__(self, runner: Any, features_width: int, kind: str) -> None:
        """runner: the head's ModelRunner. features_width: of what its prefills read.
        kind: its name, one of `HEADS`."""
        self.runner = runner
        self.kind = kind
        self.features_width = features_width
        #: [most requests, hidden] what captured steps read, None where there are none.
        self.states: Tensor | None = None
        #: Why there are no graphs of `prefills` or `steps`.
        self.missing = dict.fromkeys(("prefills", "steps"), "nothing is captured")

    def capture(self) -> None:
        """Call it once SGLang has set up its runners, without decode graphs."""
        if self.runner.device == "cpu":
            return
        self._try("prefills", self._why_no_prefills(), self._capture_prefills)
        self._try("steps", self._why_no_steps(), self._capture_steps)

    def load(self, hidden: Tensor) -> None:
        """Before a step: put its hidden states, [bs, hidden], where a graph reads."""
        if self.states is not None and len(hidden) <= len(self.states):
            self.states[: len(hidden)].copy_(hidden)

    def _try(self, what: str, why_not: str, capture: Callable[[], None]) -> None:
        if not why_not:
            try:
                capture()
                del self.missing[what]
                return
            except Exception as error:
                why_not = " ".join(str(error).split())[:300] or type(error).__name__
        self.missing[what] = why_not.rstrip(".")
        logger.info(
            "PARSE: the %s of the head %s run without CUDA graphs: %s.",
            what,
            self.kind,
            self.missing[what],
        )

    def _why_no_prefills(self) -> str:
        if check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
            return ""
        return f"--cuda-graph-backend-prefill is not {Backend.BREAKABLE}"

    def _why_no_steps(self) -> str:
        if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            return "decode graphs are off"
        backend = self.runner.decode_attention_backend_str
        if backend != STEP_BACKEND:
            return f"{backend} takes its columns from SGLang's own drafts there"
        return ""

    def _capture_prefills(self) -> None:
        runner = self.runner
        with captured_for_head(runner, SpeculativeAlgorithm[ALGORITHMS[self.kind]]):
            runner.init_prefill_cuda_graph(force_for_draft_worker=True)
            graphs = runner.prefill_cuda_graph_runner
            states = getattr(graphs, "static_draft_hidden_states", None)
            width = 0 if states is None else states.shape[1]
            if width != self.features_width:
                raise ValueError(
                    f"SGLang captured {width} features a token, expected "
                    f"{self.features_width}"
                )

    def _capture_steps(self) -> None:
        runner = self.runner
        size = runner.model_config.hidden_size

        def make_input(num_tokens: int, most: int) -> HeadInput:
            if self.states is None:
                self.states = torch.zeros(
                    (most, size), dtype=runner.dtype, device=runner.device
                )
            return HeadInput(self.states[:num_tokens])

        try:
            with captured_for_head(runner, SpeculativeAlgorithm.NONE, make_input):
                runner.init_decode_cuda_graph()
                if runner.decode_cuda_graph_runner is None:
                    raise ValueError("SGLang captured none")
        except Exception:
            self.states = None
            raise
