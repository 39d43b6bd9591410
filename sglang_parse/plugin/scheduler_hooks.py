"""Hooks around SGLang's scheduler: the queue, the lengths, and who is admitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import zmq

from sglang_parse.options.request import CLIENT_TEXTS
from sglang_parse.plugin.rounds import QUEUE, Queue
from sglang_parse.sgl.capacity import longest_pass
from sglang_parse.sgl.compat.request_changes import count_in_log, set_lens
from sglang_parse.sgl.scheduler_types import SchedulerBatch, SchedulerRequest


def run_round(
    original: Callable[..., Any],
    scheduler: Any,
    batch: SchedulerBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND hook on Scheduler.run_batch: tell a round of the queue, and spare the
    scheduler what it would read back from the device."""
    note_waiting(scheduler, batch)
    result = original(scheduler, batch, *args, **kwargs)
    keep_lens(batch, result)
    if num_more := getattr(result, "num_more_passes", 0):
        count_in_log(
            scheduler.metrics_reporter, num_passes=num_more, num_drafts=-num_more
        )
    return result


def note_waiting(scheduler: Any, batch: SchedulerBatch) -> None:
    """Note how many requests a shorter round would help.

    A request that waits for others to finish is not helped, so no more are counted than
    there are free rows.
    """
    waiting = len(scheduler.waiting_queue)
    if waiting:
        free = scheduler.get_num_allocatable_reqs(len(batch.reqs))
        waiting = min(waiting, max(0, free))
    mail = partial(has_mail, scheduler.recv_from_tokenizer)
    setattr(batch, QUEUE, Queue(waiting, mail))


def has_mail(socket: Any) -> bool:
    """Whether a message waits there. Ranks without a ZeroMQ socket follow the first
    rank."""
    return isinstance(socket, zmq.Socket) and bool(socket.poll(0))


def keep_lens(batch: SchedulerBatch, result: Any) -> None:
    """Set the lengths of the requests after a round.

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

    A token has at least one byte, so the bytes of a text bound its rows. A text that is
    alone in its batch is always admitted.
    """
    if rows := text_rows(req):
        taken = sum(text_rows(other) for other in adder.can_run_list)
        if taken and taken + rows > longest_pass():
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
    return original(adder, req, *args, **kwargs)


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


def select_runners(
    runners: Sequence[tuple[str, Any]], _: Any, selector: str = "all"
) -> list[tuple[str, Any]] | None:
    """AFTER hook on SchedulerWeightUpdaterManager._select_runners. An update that names
    no model brings the target's weights, and the draft is another model."""
    if selector != "all":
        return None
    return [(role, runner) for role, runner in runners if role == "target"]
