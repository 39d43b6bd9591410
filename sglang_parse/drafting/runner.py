"""A model that drafts on the target's slots: its SGLang worker and its forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import (
    attention_backends_of,
    resolved_view,
)
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_info import SpecInput, SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.drafting.drafter import DrafterContext
from sglang_parse.sgl.architecture import check_architecture
from sglang_parse.sgl.compat.backend_changes import plan_plain_decode
from sglang_parse.sgl.compat.model_changes import loaded_as_it_is
from sglang_parse.sgl.fast_paths import DRAFT_STEPS, FastPaths
from sglang_parse.sgl.forward_batches import build_batch, extend_fields, mark_extend
from sglang_parse.sgl.graphs import without_graphs
from sglang_parse.sgl.pacing import StepPacer


class DraftRunner:
    """Holds no per-request state. Its KV of a token lies in a pool of its own, at the
    slot the target uses (SGLang contract of the STANDALONE worker)."""

    execution = DraftTPExecution.TARGET_LAYOUT
    capture = CaptureHiddenMode.NULL
    is_head = False
    #: Its captured forwards as a fast path.
    step_path, prefill_path = DRAFT_STEPS, ""

    def __init__(
        self,
        context: DrafterContext,
        *,
        path: str,
        revision: str | None,
        flag: str,
        context_len: int | None,
    ) -> None:
        """path, revision: of the model, which `flag` names. context_len: in tokens,
        None for the model's own. Raises ValueError on a model that cannot draft."""
        server_args = context.server_args
        self.layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=self.execution)
        )
        with (
            get_spec().override(
                speculative_draft_model_path=path,
                speculative_draft_model_revision=revision,
            ),
            draft_tp_context(self.layout),
            draft_pp_context(),
            draft_model_build_scope(),
            loaded_as_it_is(is_head=self.is_head),
        ):
            self.worker = TpModelWorker(
                server_args=server_args,
                gpu_id=context.gpu_id,
                nccl_port=context.nccl_port,
                is_draft_worker=True,
                context_length=context_len,
            )
        self.runner = self.worker.model_runner
        self.paths = FastPaths()
        resolved = resolved_view(server_args)
        own = resolved.speculative_draft_attention_backend
        backends = (own,) if own else attention_backends_of(resolved)
        check_architecture(
            self.runner, flag, backends=backends, is_draft=True, is_head=self.is_head
        )

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.alloc_memory_pool(**kwargs)

    def init_attention_backends(self) -> None:
        plan_plain_decode(self.runner)
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_cuda_graphs()

    @cached_property
    def _pacer(self) -> StepPacer:
        return StepPacer(self.runner)

    @contextmanager
    def showing(self, mode: CaptureHiddenMode) -> Iterator[None]:
        """Its forwards inside the block give these hidden states."""
        before, self.capture = self.capture, mode
        try:
            yield
        finally:
            self.capture = before

    def extend(
        self,
        ids: list[int],
        rows: Tensor,
        starts: list[int],
        lens: list[int],
        table: Tensor,
        spec_info: SpecInput | None = None,
    ) -> LogitsProcessorOutput:
        """Forward lens[i] tokens of request i from position starts[i] on, ragged.

        ids: request by request; logits [bs, vocab] at each request's last.
        """
        batch = self._forward_batch(
            ForwardMode.EXTEND, **extend_fields(ids, rows, starts, lens, table)
        )
        mark_extend(batch, starts, lens)
        batch.spec_info = spec_info
        return self._forward(batch, self.prefill_path)

    def decode(
        self,
        input_ids: Tensor,
        rows: Tensor,
        position: Tensor,
        position_cpu: Tensor,
        table: Tensor,
        spec_info: SpecInput | None = None,
    ) -> LogitsProcessorOutput:
        """One draft step: token `input_ids` at `position`; logits [bs, vocab].

        Reads nothing back: its tokens stay on the device, its lengths are known on the
        host. A captured graph runs it where there is one. Waits until the step before
        the last is done.
        """
        batch = self._forward_batch(
            ForwardMode.DECODE,
            input_ids=input_ids,
            rows=rows,
            positions=position,
            out_cache_loc=table[rows, position].to(torch.int64),
            seq_lens=position + 1,
            seq_lens_cpu=position_cpu + 1,
        )
        batch.spec_info = spec_info
        self._pacer.wait()
        output = self._forward(batch, self.step_path)
        self._pacer.mark()
        return output

    def _forward_batch(self, mode: ForwardMode, **fields: Tensor) -> ForwardBatch:
        return build_batch(
            self.runner,
            mode,
            **fields,
            capture=self.capture,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def _forward(self, batch: ForwardBatch, path: str) -> LogitsProcessorOutput:
        """path: the fast path that captured graphs of the forward are."""
        forward = partial(self.runner.forward, batch)
        if not path:
            return forward().logits_output
        eager = partial(without_graphs, self.runner, forward)
        return self.paths.run(path, forward, eager).logits_output
