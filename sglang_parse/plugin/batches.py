"""A batch of SGLang's scheduler as a prefill or as a round, and its result."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from sglang.srt.managers.utils import GenerationBatchResult

from sglang_parse.client_texts.client_pass import ClientPass
from sglang_parse.engine.prefill import PrefillEngine
from sglang_parse.engine.round import RoundEngine
from sglang_parse.plugin.ending import last_words, refuse
from sglang_parse.plugin.result import (
    Emitted,
    ParseDraftInput,
    build_result,
    emit,
    emit_ready,
)
from sglang_parse.plugin.round_timing import round_timing
from sglang_parse.plugin.rounds import open_prefill, open_round
from sglang_parse.reporting.telemetry import Telemetry
from sglang_parse.requests.refusal import internal_error
from sglang_parse.requests.request_states import RequestStates
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.compat.request_changes import emits_passes
from sglang_parse.sgl.scheduler_types import SchedulerBatch

logger = logging.getLogger(__name__)


class Batches:
    """Runs what the scheduler asks for; an error of ours is told before it spreads."""

    def __init__(
        self,
        engine: RoundEngine,
        *,
        prefills: PrefillEngine,
        client_pass: ClientPass,
        requests: RequestStates,
        telemetry: Telemetry,
    ) -> None:
        self.engine = engine
        self.prefills = prefills
        self.client_pass = client_pass
        self.requests = requests
        self.telemetry = telemetry

    def prefill(self, batch: SchedulerBatch) -> GenerationBatchResult:
        """The prompts of new requests, and the texts that came with them."""
        with last_words(batch.reqs, "prefill"):
            result = self.prefills.run(open_prefill(batch, self.requests))
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = ParseDraftInput()
        return result

    def decode(self, batch: SchedulerBatch) -> GenerationBatchResult:
        """A round, and one pass for texts that wait for verdicts beside it."""
        with last_words(batch.reqs, "round"):
            return self._decode(batch)

    def _decode(self, batch: SchedulerBatch) -> GenerationBatchResult:
        states = [self.requests.of(req) for req in batch.reqs]
        index = [i for i, s in enumerate(states) if s.verification is None]
        rounds = self._run(batch, states, index) if index else []
        emitted = [Emitted()] * len(states)
        given: dict[int, list[RequestRound]] = {}
        for round in rounds:
            for r in round:
                given.setdefault(id(r.state), []).append(r)
        for i in index:
            if own := given.get(id(states[i])):
                emitted[i] = self._emit(own)
            elif states[i].ready:
                emitted[i] = emit_ready(batch.reqs[i], states[i])
        if len(index) < len(states):
            self.client_pass.go_on(batch, states)
        drafting = {i for i in index if emitted[i].r is None}
        for i, (req, one) in enumerate(zip(batch.reqs, emitted, strict=True)):
            if not one.tokens:
                emits_passes(req, [] if i in drafting else [0])
            elif len(one.passes) > 1:
                emits_passes(req, one.passes)
        return build_result(
            emitted,
            rounds[-1] if rounds else None,
            seq_lens=batch.seq_lens,
            host_lens=batch.seq_lens_cpu,
            return_logprob=batch.return_logprob,
            return_hidden_states=batch.return_hidden_states,
        )

    def _run(
        self, batch: SchedulerBatch, states: Sequence[RequestState], index: list[int]
    ) -> list[Round]:
        """A quantum of the requests at `index`; a single round where others wait for a
        pass beside it, or where more than tokens is asked for, of which a result has
        those of one pass. Returns the rounds of the passes."""
        wants_more = batch.return_logprob or batch.return_hidden_states
        open_now = partial(open_round, batch, states, index)
        if len(index) == len(states) and not wants_more:
            rounds = self.engine.run_quantum(open_now)
        else:
            rounds = [done] if (done := self.engine.run(open_now())).requests else []
        for round in rounds:
            self._tell(round)
        return rounds

    def _emit(self, rounds: Sequence[RequestRound]) -> Emitted:
        """What a request gets; nothing where a stage raised, and the error ends it."""
        last = rounds[-1]
        if last.error is None:
            return emit(rounds)
        refuse(last.req, internal_error(last.error))
        return Emitted(r=last)

    def _tell(self, round: Round) -> None:
        """Count the time of a round by stage, and its rows by kind."""
        seconds = dict(round.seconds)
        if "layout" in seconds:
            seconds["verify"] += seconds.pop("layout")
        for stage, num in seconds.items():
            self.telemetry.count("stage_seconds", num, stage)
        if round.judged and round.num_rows:
            draft = round.num_draft_rows
            self.telemetry.count("pass_rows", draft, "draft")
            self.telemetry.count("pass_rows", round.num_rows - draft, "verdict")
        if round.num_read:
            self.telemetry.count("pass_rows", round.num_read, "read")
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("PARSE round: %s", round_timing(round))
