"""SGLang's batch -> the records of a prefill or a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_parse.drafting.drafter import Prefill, PrefillRequest
from sglang_parse.requests.request_states import RequestStates
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.grammar import GrammarChain
from sglang_parse.sgl.scheduler_types import (
    RoundBatch,
    SchedulerBatch,
    SchedulerRequest,
)
from sglang_parse.sgl.views import batch_view

# Set on the batches of a PARSE server (scheduler_hooks.py): a `Queue`.
QUEUE = "parse_queue"


@dataclass(frozen=True)
class Queue:
    """Who waits for a batch to end. num_waiting: requests that a shorter round would
    help. has_mail: whether something came for the scheduler that it has not read."""

    num_waiting: int = 0
    has_mail: Callable[[], bool] = lambda: False


def queue_of(batch: SchedulerBatch) -> Queue:
    """As the scheduler left it; nobody waits where it left none."""
    found: Queue = getattr(batch, QUEUE, None) or Queue()
    return found


def open_prefill(batch: SchedulerBatch, requests: RequestStates) -> Prefill:
    """The requests of a prefill batch; what was known of them is void."""
    for req in batch.reqs:
        requests.forget(req)
    return Prefill(
        batch,
        [
            PrefillRequest(
                req=req,
                state=None if req is batch.chunked_req else requests.of(req),
                row=row,
                num_cached=num_cached,
                num_computed=num_computed,
            )
            for req, row, num_cached, num_computed in zip(
                batch.reqs,
                batch.req_pool_indices_cpu.tolist(),
                batch.prefix_lens,
                batch.extend_lens,
                strict=True,
            )
        ],
    )


def open_round(
    batch: SchedulerBatch,
    states: Sequence[RequestState],
    index: Sequence[int],
) -> Round:
    """The requests at `index` of a decode batch, as they stand before the round.

    states: of all requests of the batch.
    """
    view = batch_view(batch, index)
    rows = view.req_pool_indices_cpu.tolist()
    lens = view.seq_lens_cpu.tolist()
    vocab_size = batch.sampling_info.vocab_size
    chosen = [
        open_request(
            req,
            states[i],
            row=row,
            # KV of decided tokens that the output does not hold yet is in place.
            seq_len=num + len(states[i].ready),
            grammar=GrammarChain(req.grammar, vocab_size, batch.device)
            if req.grammar
            else None,
        )
        for i, req, row, num in zip(index, view.reqs, rows, lens, strict=True)
    ]
    queue = queue_of(batch)
    return Round(
        view,
        chosen,
        num_waiting=queue.num_waiting,
        has_mail=queue.has_mail,
        may_repeat=may_repeat(view),
    )


def may_repeat(batch: RoundBatch) -> bool:
    """Whether the next tokens need nothing that the scheduler does behind each one.

    Penalties and grammars follow the answer, and so may a logit processor.
    """
    info = batch.sampling_info
    penalties = getattr(info.penalizer_orchestrator, "is_required", False)
    return not (
        penalties
        or info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or info.has_custom_logit_processor
        or batch.return_hidden_states
        or any(req.grammar for req in batch.reqs)
    )


def open_request(
    req: SchedulerRequest,
    state: RequestState,
    *,
    row: int,
    seq_len: int,
    grammar: GrammarChain | None,
) -> RequestRound:
    """One request of a round; the rest of a client's text becomes its pending draft."""
    if state.client is not None:
        state.follow_client([*req.output_ids, *state.ready])
    return RequestRound(
        req=req,
        state=state,
        row=row,
        seq_len=seq_len,
        bonus_token=state.ready[-1] if state.ready else req.output_ids[-1],
        output_len=len(req.output_ids) + len(state.ready),
        grammar=grammar,
    )
