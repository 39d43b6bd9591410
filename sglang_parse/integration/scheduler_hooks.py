"""What PARSE has to know of SGLang's scheduler before a batch runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import zmq

from sglang_parse.integration.active import serves_parse
from sglang_parse.integration.rounds import QUEUE, Queue
from sglang_parse.options.request import CLIENT_TEXTS, wants_verdict_only
from sglang_parse.runtime.capacity import longest_pass
from sglang_parse.runtime.compat.requests import count_passes, set_lens
from sglang_parse.runtime.protocols import SchedulerBatch, SchedulerRequest


def run_round(
    original: Callable[..., Any],
    scheduler: Any,
    batch: SchedulerBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND hook on Scheduler.run_batch, where PARSE serves: what a round has to know
    of the scheduler, and what the scheduler need not read back from the device."""
    if not serves_parse():
        return original(scheduler, batch, *args, **kwargs)
    note_waiting(scheduler, batch)
    result = original(scheduler, batch, *args, **kwargs)
    keep_lens(batch, result)
    if num_more := getattr(result, "num_more_passes", 0):
        count_passes(scheduler, num_more)
    return result


def note_waiting(scheduler: Any, batch: SchedulerBatch) -> None:
    """Who waits for the round to end.

    Those that nothing but the end of others would let in are not helped by shorter
    rounds, so only as many as there are free rows.
    """
    waiting = len(scheduler.waiting_queue)
    if waiting:
        free = scheduler.get_num_allocatable_reqs(len(batch.reqs))
        waiting = min(waiting, max(0, free))
    mail = partial(has_mail, scheduler.recv_from_tokenizer)
    setattr(batch, QUEUE, Queue(waiting, mail))


def has_mail(socket: Any) -> bool:
    """Whether a message waits there. Ranks that have no socket follow the first one;
    what is no ZeroMQ socket says nothing."""
    return isinstance(socket, zmq.Socket) and bool(socket.poll(0))


def keep_lens(batch: SchedulerBatch, result: Any) -> None:
    """The lengths of a round's requests behind it.

    SGLang would copy them back from the device, and wait for all that runs there.
    """
    if (lens := getattr(result, "host_lens", None)) is not None:
        set_lens(batch, result.lens, lens)


def admit_texts(
    original: Callable[..., Any],
    adder: Any,
    req: SchedulerRequest,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND hook on PrefillAdder.add_one_req: clients' texts of one prefill batch fit
    into one pass, so that no step takes longer than a prefill and a pass.

    A token has at least one byte, so bytes bound the rows of a text. A text that is
    alone in its batch is always admitted.
    """
    if serves_parse() and (rows := text_rows(req)):
        taken = sum(text_rows(other) for other in adder.can_run_list)
        if taken and taken + rows > longest_pass():
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


def check_sampling_mask(
    original: Callable[..., Any], req: SchedulerRequest, algorithm: Any
) -> str | None:
    """AROUND hook on validate_spec_sampling_mask_request: why a request cannot be told
    what its tokens are drawn from, None where it can.

    Such a request is followed token by token, and each of its tokens is sampled as
    SGLang samples in a decode step.
    """
    if not serves_parse():
        told: str | None = original(req, algorithm)
        return told
    if wants_verdict_only(req):
        return (
            "return_sampling_mask is true beside custom_params.parse_verify, which "
            "samples nothing; leave one of them out."
        )
    return None


def text_rows(req: SchedulerRequest) -> int:
    """Most rows that the text of a request takes in a pass; 0 without one."""
    params = req.sampling_params.custom_params
    if not isinstance(params, Mapping) or req.output_ids:
        return 0
    texts = [params[name] for name in CLIENT_TEXTS if name in params]
    if not texts or "parse_verify" in params:
        return 0  # a text that is judged alone waits for room by itself
    text = str(texts[0])
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
