"""The report of a finished request: its text, and whether it counts."""

from types import SimpleNamespace

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN

from sglang_parse.plugin import report_streamer as report
from sglang_parse.reporting.report import RequestReport, attach
from sglang_parse.reporting.telemetry import Telemetry

END, CALL = 1, 2
NAMES = {END: "<end>", CALL: "<call>"}


def decode(ids, skip_special_tokens, spaces_between_special_tokens):
    del spaces_between_special_tokens
    shown = [i for i in ids if i not in NAMES or not skip_special_tokens]
    return "".join(NAMES.get(i, chr(i)) for i in shown)


class Request:
    def __init__(self, output_ids, reason, *, rid="r", skip=True, **params):
        self.rid = rid
        self.output_ids = output_ids
        self.finished_len = len(output_ids)
        self.finished_reason = reason
        self.tokenizer = SimpleNamespace(decode=decode)
        self.sampling_params = SimpleNamespace(
            skip_special_tokens=skip,
            spaces_between_special_tokens=True,
            **{"no_stop_trim": False, "max_new_tokens": 50} | params,
        )

    def finished(self):
        return True


@pytest.fixture(autouse=True)
def counts(monkeypatch):
    found = Telemetry()
    monkeypatch.setattr(report, "TELEMETRY", found)
    return found


def texts(req, judged_text=None):
    own = RequestReport("semantic", "", want_segments=True)
    own.judged_text = judged_text
    attach(req, own)
    (result,) = report._final_report(req)
    return "".join(s["text"] for s in result["segments"])


ANSWER = [ord("a"), CALL, ord("b"), END]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "ab"),
        ({"skip": False}, "a<call>b"),
        ({"skip": False, "no_stop_trim": True}, "a<call>b<end>"),
    ],
)
def test_segments_spell_the_answer_as_it_is_shown(options, shown):
    """Red if offsets count other text than the client got, as with tools."""
    assert texts(Request(ANSWER, FINISH_MATCHED_TOKEN(END), **options)) == shown


def test_an_answer_cut_by_length_keeps_its_last_token():
    """Red if a token that is no stop is taken for one and left out."""
    req = Request(ANSWER[:2], FINISH_LENGTH(2), skip=False)
    assert texts(req) == "a<call>"


@pytest.mark.parametrize(
    ("changes", "num"),
    [
        ({}, 1),
        ({"rid": f"{HEALTH_CHECK_RID_PREFIX}_1"}, 0),
        ({"max_new_tokens": 0}, 0),
    ],
)
def test_requests_that_no_user_sent_do_not_count(counts, changes, num):
    """Red if probes of an idle server look like traffic."""
    texts(Request(ANSWER, FINISH_MATCHED_TOKEN(END), **changes))
    assert sum(counts.counts["requests"].values()) == num
