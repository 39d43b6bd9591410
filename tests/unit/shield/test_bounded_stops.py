"""Stop expressions end answers as SGLang would, and end no scheduler."""

import re
import time
from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.shield import bounded_stops as stops
from sglang_parse.shield.bounded_stops import bound_search
from sglang_parse.shield.seams import SHIELD_ENV

HOSTILE = ("(.*.*.*.*)*#", "(a|aa)+$", "(a+)+b", r"(\w+\s?)*!")


class Tokenizer:
    """One character, one token."""

    eos_token_id = additional_stop_token_ids = None

    def decode(self, ids):
        return "".join(map(chr, ids))

    def encode(self, text, **_):
        return [ord(c) for c in text]


@pytest.fixture(autouse=True)
def shielded(monkeypatch):
    monkeypatch.setenv(SHIELD_ENV, "1")
    monkeypatch.setattr(runtime_context, "get_server_args", SimpleNamespace)
    monkeypatch.setattr(schedule_batch, "re", re)


def request(*expressions, text="", **params):
    given = SamplingParams(stop_regex=list(expressions), max_new_tokens=9999, **params)
    given.normalize(Tokenizer())
    req = Req("r", "", [1], given, eos_token_ids=set(), vocab_size=1 << 20)
    req.tokenizer = Tokenizer()
    req.output_ids = [ord(c) for c in text]
    return req


def finish(req, num_new, *, bounded=True):
    schedule_batch.re = re
    if bounded:
        bound_search(req, num_new)
    req.update_finish_state(num_new)
    reason = req.finished_reason
    return reason and (type(reason).__name__, req.finished_len, reason.to_json())


@pytest.mark.parametrize("num_new", [1, 3, 7])
@pytest.mark.parametrize(
    ("expressions", "params"),
    [
        ([r"\d+\."], {}),
        (["z", "a.c"], {}),
        (["c$"], {}),
        (["(?P<x>b)c(?!d)"], {}),
        (["ab"], {"stop": ["bc"]}),
        (["q"], {"stop": ["nothing"]}),
    ],
)
def test_answers_end_where_sglang_ends_them(num_new, expressions, params):
    """Red if an expression or a stop string beside it ends an answer elsewhere."""
    for text in ("abc", "xabc", "abcd 12.", "12. abc", "qqqqqqqqq"):
        size = min(num_new, len(text))
        ours, theirs = (request(*expressions, text=text, **params) for _ in "12")
        assert finish(ours, size) == finish(theirs, size, bounded=False)


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("expression", HOSTILE)
def test_an_expression_takes_bounded_time(expression, num_new):
    """Red if a client's expression freezes the scheduler, or its end is no HTTP 400."""
    req = request(expression, text="a" * 3000 + " c")
    started = time.thread_time()
    found = finish(req, num_new)
    assert time.thread_time() - started < 3 * stops.SEARCH_S
    if found:
        assert found[2]["status_code"] == 400
        assert "takes too long" in found[2]["message"]


def test_all_searches_of_an_answer_together_are_bounded(monkeypatch):
    """Red if searches that are each just in time hold up other requests for hours."""
    monkeypatch.setattr(stops, "ANSWER_S", -1.0)
    found = finish(request("a.c", text="abd"), 1)
    assert found[0] == "FINISH_ABORT" and "takes too long" in found[2]["message"]


def test_a_late_search_in_the_middle_of_a_step_waits_for_the_next(monkeypatch):
    """Red if a search that SGLang does not guard ends the scheduler."""
    search = stops.BoundedSearch()
    search.begin(request("a.c", text="abd"))
    assert search.search("a.c", "abd") is None
    monkeypatch.setattr(stops.regex, "search", raise_timeout)
    assert search.search("a.c", "ab") is None
    search.begin(search.req)
    with pytest.raises(re.error, match="takes too long"):
        search.search("a.c", "abd")


def raise_timeout(*args, **kwargs):
    raise TimeoutError


def test_other_servers_search_as_before(monkeypatch):
    """Red if a server that nobody shields searches with another engine."""
    monkeypatch.setenv(SHIELD_ENV, "0")
    assert finish(request("a.c", text="abc"), 1)[0] == "FINISHED_MATCHED_REGEX"
    assert schedule_batch.re is re
