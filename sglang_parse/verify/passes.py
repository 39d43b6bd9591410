"""VerifyPlan -> one target forward -> hidden states and verdict logits.

The pass runs in SGLang's TARGET_VERIFY mode with our own spec input, which hands the
attention backend the ragged CSR arrays and the mask. The LM head runs at the verdict
rows inside the pass, and after it, in waves, at the rows that the decision needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    get_server_return_hidden_states_mode,
)
from torch import Tensor

from sglang_parse.sgl.compat.backend_changes import holds_pass
from sglang_parse.sgl.compat.graph_changes import (
    graphs_of_pass,
    pass_eager_inputs_through,
)
from sglang_parse.sgl.compat.model_changes import (
    ShownLayers,
    States,
    show_layers,
    take_states,
    wait_in_gathers,
)
from sglang_parse.sgl.fast_paths import (
    PASS_GRAPHS,
    SHORT_PASSES,
    TARGET_STEPS,
    FastPaths,
    PassFailed,
    PassLacksMemory,
    route_path,
)
from sglang_parse.sgl.forward_batches import (
    build_batch,
    count_tokens,
    extend_fields,
    mark_extend,
    set_mrope_positions,
)
from sglang_parse.sgl.graphs import PassGraphs, without_graphs
from sglang_parse.sgl.pacing import StepPacer
from sglang_parse.sgl.scheduler_types import SchedulerBatch
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.backends.routes import backend_of, build_verify_input
from sglang_parse.verify.backends.verify_backend import ParseVerifyInput, place_slots
from sglang_parse.verify.layout import VerifyPlan
from sglang_parse.verify.lm_head import lm_head_of
from sglang_parse.verify.output import PassOutput


def select_logits_rows(result: LogitsMetadata, *args: Any, **_: Any) -> LogitsMetadata:
    """AFTER hook on LogitsMetadata.from_forward_batch: LM head at our rows only."""
    spec_info = getattr(args[-1], "spec_info", None)
    if isinstance(spec_info, ParseVerifyInput):
        result.draft_extend_select_index = spec_info.logits_rows
    return result


class TargetVerifier:
    """Runs verify passes and LM-head calls on the target model."""

    def __init__(self, target_worker: Any, spec_algorithm: Any) -> None:
        self.target_worker = target_worker
        self.runner = target_worker.model_runner
        self.spec_algorithm = spec_algorithm
        self.pass_graphs = PassGraphs(self.runner)
        self.paths = FastPaths()
        self.shows_features = False  # set where a head reads them
        #: Layers whose hidden states verdicts read, None where none does.
        self.shown: ShownLayers | None = None
        self._of_head: Tensor | slice = slice(None)
        self._of_verdicts: Tensor | slice = slice(None)
        self.lm_head = lm_head_of(self.runner.model)
        pass_eager_inputs_through()
        wait_in_gathers(self.lm_head.processor)

    @cached_property
    def _pacer(self) -> StepPacer:
        return StepPacer(self.runner)

    def show_layers(self, layers: Sequence[int], flag: str) -> None:
        """Have passes keep the hidden states in front of these layers (`states_at`).

        Call it once drafters are made, before graphs are captured. Raises ValueError
        naming `flag` where the target cannot.
        """
        shown = self.shown = show_layers(self.runner, flag, layers=layers)
        device = self.runner.device
        if shown.layers != shown.head:
            self._of_head = torch.tensor(shown.columns(shown.head), device=device)
        if shown.layers != tuple(layers):
            self._of_verdicts = torch.tensor(shown.columns(layers), device=device)

    @property
    def routes(self) -> list[str]:
        """The routes of a pass that may be taken, the preferred one first."""
        routes = backend_of(self.runner.prefill_attention_backend_str).inputs
        every = [r for r in routes if not self.paths.is_off(route_path(r))]
        # One that is left out for a while is still taken where there is no other.
        return [r for r in every if self.paths.is_on(route_path(r))] or every

    @property
    def steps_alone(self) -> bool:
        """Whether a pass can be a chain of tokens in decode rows and nothing else."""
        return not backend_of(self.runner.prefill_attention_backend_str).inputs

    @property
    def can_pass(self) -> bool:
        """Whether there is a way for a pass."""
        if self.steps_alone:
            return not self.paths.is_off(SHORT_PASSES)
        return bool(self.routes)

    def verify(self, plan: VerifyPlan, **where: Any) -> PassOutput:
        """Run the pass by the first route that can; `where` as for `verify_by`.

        Raises PassFailed where none can, PassLacksMemory where that may pass.
        """
        for route in self.routes:
            try:
                return self.paths.run(
                    PASS_GRAPHS,
                    partial(self.verify_by, route, plan, **where),
                    partial(self.verify_by, route, plan, **where, by_graphs=False),
                )
            except Exception as error:
                others = [r for r in self.routes if r != route]
                instead = f"{others[0]} takes its place" if others else "none is left"
                self.paths.break_off(route_path(route), error, instead)
        if self.routes:
            raise PassLacksMemory("memory ran out in the verify pass")
        raise PassFailed("no verify route is left")

    def verify_by(
        self,
        route: str,
        plan: VerifyPlan,
        *,
        rows: Sequence[int],
        req_pool_indices: Tensor,
        scratch: Tensor,
        table: Tensor,
        mrope_shifts: Sequence[int] = (),
        by_graphs: bool = True,
    ) -> PassOutput:
        """Run the pass by a route. scratch: [plan.num_suffix_tokens] int64 slots.

        rows: of req_to_token, which is `table`, and req_pool_indices: [bs] the same on
        the device. mrope_shifts: per request, how far images have moved its positions.
        by_graphs: whether prefill graphs may serve it.
        Writes target KV of the bonus and draft tokens at columns seq_len.. of their
        rows.
        """
        device = table.device
        slots, out_cache_loc = place_slots(
            plan, rows=rows, scratch=scratch, table=table
        )
        verdict_rows = [r for rows in plan.verdict_rows for r in rows]
        logits_rows = upload(verdict_rows or [0], device)
        backend = self.runner.prefill_attention_backend_str
        spec_info = build_verify_input(route, backend, plan, slots, logits_rows)
        forward_batch = ForwardBatch(
            input_ids=upload(plan.input_ids, device),
            out_cache_loc=out_cache_loc,
            positions=upload(plan.positions, device),
            spec_algorithm=self.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            global_num_token_non_padded_cpu=plan.num_verify_tokens,
            **spec_info.batch_fields(req_pool_indices),
        )
        shift = None
        if any(mrope_shifts):
            num_rows = torch.tensor(plan.qo_lens)
            shifts = torch.tensor(mrope_shifts).repeat_interleave(num_rows)
            shift = shifts.to(device)
        set_mrope_positions(self.runner, forward_batch, shift)
        count_tokens(self.runner, forward_batch)
        self.runner.kv_index_translator.bind_own_plan(forward_batch)
        with (
            self.pass_graphs.serve(forward_batch)
            if by_graphs
            else graphs_of_pass(self.runner),
            holds_pass(
                self.runner.attn_backend,
                backend_of(backend).buffers,
                num_sequences=forward_batch.batch_size,
                table=spec_info.table,
            ),
        ):
            result = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True
            )
        return self._output(result.logits_output, num_logits=len(verdict_rows))

    def decode(
        self,
        *,
        input_ids: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        table: Tensor,
        return_hidden_states: bool,
        is_followed: bool = True,
        mrope_shifts: Sequence[int] = (),
    ) -> PassOutput:
        """One ordinary decode step, a row per request.

        input_ids: [bs], the bonus tokens; seq_lens: tokens before them. is_followed:
        whether a head reads features, if there is one. mrope_shifts: as for `verify`.
        A round without drafts is the target's own decode step and costs the same.
        """
        wanted = CaptureHiddenMode.NULL
        if return_hidden_states:
            wanted = CaptureHiddenMode.LAST  # the only one of each request
        # With layers shown, only FULL keeps the final hidden states apart from them.
        shows_features = self.shows_features and is_followed
        if shows_features or (return_hidden_states and self.shown is not None):
            wanted = CaptureHiddenMode.FULL
        graphs = self.runner.decode_cuda_graph_runner
        captured = getattr(graphs, "capture_hidden_mode", CaptureHiddenMode.FULL)
        forward_batch = build_batch(
            self.runner,
            ForwardMode.DECODE,
            input_ids=input_ids,
            rows=req_pool_indices,
            positions=seq_lens,
            out_cache_loc=table[req_pool_indices, seq_lens].to(torch.int64),
            seq_lens=seq_lens + 1,
            seq_lens_cpu=seq_lens_cpu + 1,
            capture=wanted,
            spec_algorithm=self.spec_algorithm,
            mrope_shift=torch.tensor(mrope_shifts, device=input_ids.device)
            if any(mrope_shifts)
            else None,
        )
        forward = partial(
            self.target_worker.forward_batch_generation,
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
        )
        self._pacer.wait()  # a round may have several steps
        eager = partial(without_graphs, self.runner, forward)
        if wanted <= captured:
            result = self.paths.run(TARGET_STEPS, forward, eager)
        else:
            result = eager()
        self._pacer.mark()
        output = self._output(result.logits_output, num_logits=len(input_ids))
        return replace(output, has_all_logits=True)

    def prefill(
        self, batch: SchedulerBatch, *, needed: bool
    ) -> tuple[GenerationBatchResult, Tensor | None]:
        """SGLang's own prefill of a batch, and the features of its tokens.

        needed: False where a pass after it computes the batch's only tokens again, as
        with a cached prompt whose last token begins the pass; then nothing runs.
        """
        if not needed:
            return GenerationBatchResult(
                logits_output=LogitsProcessorOutput(next_token_logits=None),
                next_token_ids=torch.zeros(
                    len(batch.reqs), dtype=torch.int64, device=batch.device
                ),
                can_run_cuda_graph=False,
            ), None
        takes = self.shows_features
        if self.shown is not None:
            takes = takes or self._hidden_mode(batch).need_capture()
        wanted = CaptureHiddenMode.FULL if takes else None
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=wanted
        )
        if not takes:
            return result, None
        last_rows = None
        if self._shows_last(batch):
            ends = torch.tensor(batch.extend_lens, device=batch.device).cumsum(0)
            last_rows = ends - 1
        states = take_states(result.logits_output, last_rows)
        return result, self._features(states) if self.shows_features else None

    def _hidden_mode(self, batch: SchedulerBatch) -> CaptureHiddenMode:
        """What SGLang itself expects of a prefill's hidden states."""
        return max(
            batch.return_hidden_states_mode, get_server_return_hidden_states_mode()
        )

    def _shows_last(self, batch: SchedulerBatch) -> bool:
        """Whether SGLang expects one hidden state of each request of a prefill
        (batch_result_processor.py, `_append_prefill_hidden_states`)."""
        return self._hidden_mode(batch).is_last()

    def features_of(
        self,
        ids: Sequence[int],
        *,
        row: int,
        start: int,
        scratch: Tensor,
        table: Tensor,
    ) -> Tensor:
        """[len(ids), width] what a head reads at cached positions, computed
        again: the tokens `ids` of one request from position `start` on.

        row: of req_to_token. scratch: [len(ids)] slots for the KV that this computes;
        the cached KV, which others may be reading, stays as it is.
        """
        rows, lens = torch.tensor([row], device=table.device), [len(ids)]
        fields = extend_fields(ids, rows, [start], lens, table)
        batch = build_batch(
            self.runner,
            ForwardMode.EXTEND,
            **{**fields, "out_cache_loc": scratch},
            capture=CaptureHiddenMode.FULL,
            spec_algorithm=self.spec_algorithm,
        )
        mark_extend(batch, [start], lens)
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=batch, is_verify=True
        )
        return self._features(States.of(result.logits_output))

    def _features(self, states: States) -> Tensor:
        """What a head reads: the layers that are shown for it, or the final states."""
        if states.layers is None or (self.shown is not None and not self.shown.head):
            return states.final
        return states.layers[:, self._of_head]

    def _output(self, output: LogitsProcessorOutput, num_logits: int) -> PassOutput:
        logits = output.next_token_logits[:num_logits]
        if output.hidden_states is None:
            return PassOutput(None, logits)
        states, layers = States.of(output), None
        if self.shown is not None and states.layers is not None:
            layers = states.layers[:, self._of_verdicts]
        return PassOutput(
            states.final,
            logits,
            features=self._features(states) if self.shows_features else None,
            layers=layers,
        )

    def logits_of(self, output: PassOutput, rows: Sequence[int]) -> Tensor:
        """Target logits [len(rows), vocab] at rows of a pass or of a decode step."""
        if not output.has_all_logits:
            return self.logits_at(output, rows)
        # A copy: sampling writes into it, and may have to begin again.
        return output.logits[upload(rows, output.logits.device)]

    def logits_at(self, output: PassOutput, rows: Sequence[int]) -> Tensor:
        """Target logits [len(rows), vocab] at rows of the pass."""
        hidden_states = output.hidden_states
        assert hidden_states is not None
        index = upload(rows, hidden_states.device)
        result = self.lm_head.processor(
            None,
            hidden_states[index],
            self.lm_head.weights,
            LogitsMetadata(forward_mode=ForwardMode.DECODE),
        )
        return result.next_token_logits
