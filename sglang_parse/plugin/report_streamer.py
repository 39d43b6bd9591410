"""The report of a request on its way into `meta_info["parse"]`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

from sglang_parse.reporting.report import RequestReport, report_of
from sglang_parse.reporting.telemetry import TELEMETRY
from sglang_parse.sgl.scheduler_types import SchedulerRequest

KEY = "parse"


def streamer_class(base: type, *_: Any) -> type:
    """AFTER hook on Scheduler.get_output_streamer_class."""
    return _with_report(base)


@functools.cache
def _with_report(base: Any) -> type:
    class ParseOutputStreamer(base):
        """Adds the report to the last output of a request.

        One list per emitted request; TokenizerManager extends them over the
        emissions, so `meta_info["parse"]` is a list with one report
        (sglang/srt/managers/scheduler_components/output_streamer.py).
        """

        has_additional_customized_info = True

        def build_additional_customized_info(
            self, reqs: list[SchedulerRequest]
        ) -> dict[str, list[Any]]:
            result = super().build_additional_customized_info(reqs)
            if any(report_of(req) is not None for req in reqs):
                result[KEY] = [_final_report(req) for req in reqs]
            return result

    return ParseOutputStreamer


def keep_report(
    original: Callable[..., Any], meta_info: dict[Any, Any], *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on tokenizer_manager._slice_streaming_output_meta_info, which assumes
    that each list has an entry per token. The report is about the whole request."""
    report = meta_info.get(KEY)
    result = original(meta_info, *args, **kwargs)
    if report is not None:
        meta_info[KEY] = report
    return result


def _final_report(req: SchedulerRequest) -> list[dict[str, Any]]:
    report = report_of(req)
    if report is None or not req.finished():
        return []
    # Tokens after a stop are in output_ids until the request is gone.
    output_ids = req.output_ids[: getattr(req, "finished_len", None)]
    report.finish(output_ids)
    if not _is_own(req):
        TELEMETRY.add_request(report)
    return [report.as_dict(output_ids, _decoder(req, report, output_ids))]


def _is_own(req: SchedulerRequest) -> bool:
    """Whether SGLang sent it and not a user: health checks, and the copy that fills the
    cache for `n` answers."""
    is_check = str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)
    return is_check or req.sampling_params.max_new_tokens == 0


def _decoder(
    req: SchedulerRequest, report: RequestReport, output_ids: Sequence[int]
) -> Callable[[list[int]], str]:
    """Turns token ids into text as the answer shows it; judged text is shown whole, and
    nothing where the server answers in ids alone (--skip-tokenizer-init)."""
    params, tokenizer = req.sampling_params, req.tokenizer
    if tokenizer is None:
        return lambda token_ids: ""
    skip = params.skip_special_tokens and report.judged_text is None
    reason = req.finished_reason
    is_trimmed = isinstance(reason, FINISH_MATCHED_TOKEN) and not params.no_stop_trim

    def decode(token_ids: list[int]) -> str:
        if is_trimmed and not skip and token_ids == list(output_ids):
            token_ids = token_ids[:-1]
        return str(
            tokenizer.decode(
                token_ids,
                skip_special_tokens=skip,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        )

    return decode
