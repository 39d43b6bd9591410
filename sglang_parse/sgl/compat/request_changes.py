"""Changes to requests, batches and figures of SGLang's scheduler while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from torch import Tensor

from sglang_parse.sgl.scheduler_types import SchedulerRequest


def set_allocated_len(req: SchedulerRequest, num_columns: int) -> None:
    """Tell SGLang how many columns of a request's row hold slots of that request.

    What: writes `Req.kv.kv_allocated_len`.
    Why: PARSE takes and frees slots inside a round. By this length SGLang frees the
    slots of a finished request and reserves those of its next step.
    Where: mem_cache/allocation.py, `alloc_for_spec_decode`; mem_cache/common.py,
    `release_kv_cache`.
    Ends with: functions that grow and shrink one request's row.
    """
    req.kv.kv_allocated_len = num_columns


def abort(
    req: SchedulerRequest, message: str, *, status: HTTPStatus, err_type: str
) -> None:
    """End a request with an HTTP error at the end of this step.

    message: one sentence for the sender. err_type: SGLang's name of the kind of error.

    What: writes `Req.to_finish`, as SGLang's own aborts do.
    Why: a request may turn out to be impossible after the scheduler has admitted it,
    and SGLang lets registered algorithms check requests nowhere.
    Where: managers/schedule_batch.py, `Req.update_finish_state`.
    Ends with: a method of CustomSpecAlgo that checks a request.
    """
    req.to_finish = FINISH_ABORT(message, status_code=status, err_type=err_type)


def serve_plainly(req: SchedulerRequest) -> None:
    """Serve a request one token at a time, whatever its options say.

    What: replaces its `custom_params`.
    Why: a request whose options could not be checked ends with an error at the end of
    this step, and until then it is part of the batch.
    Where: sampling/sampling_params.py, `SamplingParams.custom_params`.
    Ends with: a method of CustomSpecAlgo that checks a request.
    """
    req.sampling_params.custom_params = {"parse_mode": "off"}


def hold(req: SchedulerRequest, *, until_released: bool = True) -> None:
    """Let a request that has its only token run on without output, or release it.

    What: raises the request's limit by one and takes its other stops away; a release
    puts the limit of one token back.
    Why: a text that is judged alone may need passes in several steps, and SGLang ends
    a request after any step in which it finds a stop.
    Where: managers/schedule_batch.py, `Req.update_finish_state`.
    Ends with: a flag of Req that keeps it running.
    """
    params = req.sampling_params
    params.max_new_tokens = 2 if until_released else 1
    if until_released:
        params.ignore_eos = True
        params.stop_strs, params.stop_regex_strs = [], []


def release(req: SchedulerRequest) -> None:
    """End a request that was held, at its one token.

    What: puts the limit of one token back.
    Why: the verdicts of its text are complete (`hold`).
    Where: managers/schedule_batch.py, `Req.update_finish_state`.
    Ends with: a flag of Req that keeps it running.
    """
    hold(req, until_released=False)


def bar_from_cache(req: SchedulerRequest) -> None:
    """Keep the KV of a request out of the radix cache from now on.

    What: writes `Req.skip_radix_cache_insert`, as SGLang does for KV that never landed.
    Why: where a pass is to compute a prompt's last token, the prefill does not; if that
    pass does not run in the same step, the slot holds no KV of this token.
    Where: mem_cache/common.py, `checkpoint_kv_cache` and `release_kv_cache`.
    Ends with: a result of a prefill that says whose KV is complete.
    """
    req.skip_radix_cache_insert = True


def emits_passes(req: SchedulerRequest, passes: Sequence[int]) -> None:
    """Prepare a request for a result of several passes, or of one without a token.

    passes: how many tokens each of them gave.

    What: moves the request's counts of passes and of correct drafts beforehand, so that
    they are right once SGLang has counted one pass with all the tokens.
    Why: SGLang takes all tokens of a result but one for correct drafts, which is -1 in
    a step without a token.
    Where: scheduler_components/batch_result_processor.py, `_resolve_spec_v2_tokens`.
    Ends with: a result that says how many passes gave it, each of 0 tokens or more.
    """
    total, gave = sum(passes), [num for num in passes if num]
    histogram = req.spec_correct_drafts_histogram
    histogram += [0] * (max(total, 1) - len(histogram))
    for num in gave:
        histogram[num - 1] += 1
    histogram[total - 1] -= 1
    req.spec_verify_ct += len(passes) - 1
    req.spec_num_correct_drafts += (total - len(gave)) - (total - 1)


def count_in_log(metrics: Any, *, num_passes: int = 0, num_drafts: float = 0) -> None:
    """Correct the server's figures, from which the log has `accept len` and `accept
    rate`, beforehand.

    metrics: the scheduler's `metrics_reporter`.

    What: adds to `spec_num_forward_ct` and `spec_num_correct_drafts`.
    Why: SGLang counts one pass of each request of a result, and divides correct drafts
    by passes times one draft length; a result may have several, and drafts here have
    many lengths.
    Where: scheduler_components/metrics_reporter.py, `update_spec_metrics` and
    `report_decode_stats`.
    Ends with: a result that says how many passes gave it, and a quotient of the counts
    of drafts that SGLang keeps.
    """
    metrics.spec_num_forward_ct += num_passes
    metrics.spec_num_correct_drafts += num_drafts


def set_lens(batch: Any, lens: Tensor, on_host: Tensor) -> None:
    """Tell SGLang the lengths of a batch's requests after a round.

    What: writes the batch's `seq_lens`, `seq_lens_cpu` and `seq_lens_sum`.
    Why: SGLang would copy the lengths back from the device, and so wait for the step
    that runs ahead of the next round.
    Where: managers/scheduler.py, `run_batch`.
    Ends with: a result of a worker that carries its lengths on the host.
    """
    batch.seq_lens, batch.seq_lens_cpu = lens, on_host
    batch.seq_lens_sum = int(on_host.sum())
