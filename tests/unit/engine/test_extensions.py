"""What extensions raise costs speed, never an answer: drafts are followed instead."""

import logging
from collections import Counter

import pytest
import torch

from sglang_parse.client_texts.client_drafts import Bounds, draft_of
from sglang_parse.engine.failures import ExtensionErrors
from sglang_parse.engine.segmenting import Segmenting
from sglang_parse.judging import segmenter
from sglang_parse.judging.extension_rules import checked_rule
from sglang_parse.options import segmenters
from sglang_parse.options.extensions import ExtensionError, Extensions
from sglang_parse.requests.client_text import ClientText
from sglang_parse.requests.refusal import Refusal
from sglang_parse.requests.round_records import RequestRound
from tests.support.fake_engine import (
    LINE,
    TEXTS,
    FakeDrafter,
    FakeServer,
    FakeTarget,
    make_request,
)

START = (10, 11, 12)
DRAFT = (20, 21, LINE, 22, 23, LINE, 24, 25)
OWN = (20, 21, LINE, 22, 31, LINE, 33, 34)  # the target differs at the fifth token


class Broken:
    """Raises, returns what it should not, or cuts by lines, as `behaviour` says."""

    def __init__(self):
        self.behaviour = ValueError("broken")

    def __call__(self, draft):
        if isinstance(self.behaviour, Exception):
            raise self.behaviour
        if self.behaviour is None:
            return [i + 1 for i, text in enumerate(draft.pieces) if text == "\n"]
        return self.behaviour


@pytest.fixture
def rule(monkeypatch):
    """A segmenter `mine` of an installed package."""
    one = Broken()
    offered = type("Offered", (Extensions,), {"found": {"mine": None}})
    extensions = offered("segmenter", (), "")
    monkeypatch.setattr(extensions, "check", lambda name, field: name == "mine")
    monkeypatch.setattr(segmenters, "SEGMENTER_EXTENSIONS", extensions)
    monkeypatch.setitem(segmenter.RULES, "mine", checked_rule("mine", one))
    return one


@pytest.fixture
def errors():
    """Errors by kind and name, and the note that counts them."""
    counts: Counter[tuple[str, str]] = Counter()
    told = ExtensionErrors(lambda kind, name: counts.update([(kind, name)]))
    told.counts = counts
    return told


def serve(errors, judge=None):
    """A server whose target agrees with four tokens of the draft, and whose judge finds
    all of it right unless told otherwise."""

    def own(tokens):
        text = (*START, *OWN)
        return text[len(tokens)] if tokens == text[: len(tokens)] else 9

    model = FakeDrafter(lambda tokens: (*START, *DRAFT)[len(tokens) :])
    server = FakeServer(FakeTarget(own, lambda tokens: 0.9), [model])
    server.engine.segmenting = Segmenting(server.config, TEXTS, errors.note)
    server.engine.verdicts.on_error = errors.note
    if judge is not None:
        server.engine.verdicts.judge = judge
    return server


@pytest.mark.parametrize("bad", [ValueError("broken"), [99], [3, 3], ["x"], 7])
def test_failing_segmenter_leaves_the_targets_answer(rule, errors, bad):
    """Red if a draft stands that was neither judged nor the target's own, or if the
    round, or a request beside this one, is lost."""
    rule.behaviour = bad
    server = serve(errors)
    mine, other = make_request(segmenter="mine"), make_request()
    broken, whole = server.round(mine, other)
    assert mine.output_ids == [12, *OWN[:5]]
    assert broken.boundaries == () and broken.error is None
    assert other.output_ids == [12, *DRAFT[:6], 9] and whole.boundaries == (3, 6)
    assert errors.counts == {("segmenter", "mine"): 1}
    rule.behaviour = None
    again = make_request(segmenter="mine")
    server.round(again)
    assert again.output_ids == other.output_ids


def test_segmenter_that_fails_while_the_target_recovers(rule, errors):
    """Red if the request ends, or verdicts count again although nobody knows where the
    rejected segment ends."""
    server = serve(errors)
    server.target.judge = lambda tokens: 0.1 if 23 in tokens else 0.9
    rule.behaviour = None
    req = make_request(segmenter="mine")
    server.round(req)
    assert req.state.recovering == 1
    rule.behaviour = ValueError("broken")
    while len(req.output_ids) < len(OWN):
        (r,) = server.round(req)
        assert r.error is None and r.boundaries == () and req.state.recovering == 1
    assert tuple(req.output_ids[1:]) == OWN[: len(req.output_ids) - 1]


def test_failing_judge_leaves_the_targets_answer(errors):
    """Red if a prefix without a verdict stands, counts as rejected, or is reported as
    judged."""
    calls = []

    def judge(logits, asked):
        calls.append((logits.shape, len(asked)))
        raise ExtensionError("judge", "mine", "failed on a pass")

    server = serve(errors, judge)
    req = make_request()
    (r,) = server.round(req)
    assert calls == [((2, logits_width()), 2)]
    assert req.output_ids == [12, *OWN[:5]]
    assert (r.rejected_end, req.state.recovering) == (0, 0)
    counters = req.state.report.counters
    assert (counters.judged_segments, counters.matched_tokens) == (0, 4)
    assert errors.counts == {("judge", "mine"): 1}
    assert req.state.report.as_dict(req.output_ids, str)["segments"]


def logits_width():
    return len(TEXTS)


def test_judge_that_fails_once_is_asked_again(errors):
    """Red if one error turns verdicts off for good."""
    failing = [True]

    def judge(logits, asked):
        if failing.pop() if failing else False:
            raise ExtensionError("judge", "mine", "failed on a pass")
        return [0.9] * len(asked)

    server = serve(errors, judge)
    first, second = make_request(), make_request()
    server.round(first)
    server.round(second)
    assert second.output_ids == [12, *DRAFT[:6], 9]


def test_first_error_is_logged_and_all_are_counted(errors, caplog):
    """Red if a broken extension fills the log, or its traceback is nowhere."""
    with caplog.at_level(logging.ERROR):
        for name in ("mine", "mine", "yours"):
            try:
                raise ExtensionError("judge", name, "failed") from KeyError("why")
            except ExtensionError as error:
                errors.note(error)
    assert errors.counts == {("judge", "mine"): 2, ("judge", "yours"): 1}
    assert len(caplog.records) == 2
    assert "KeyError: 'why'" in caplog.text and "the judge 'mine' failed" in caplog.text


@pytest.mark.parametrize("field", ["draft", "verify"])
def test_clients_text_without_boundaries(rule, errors, field):
    """Red if a text that is to be kept is not followed token by token, or one that is
    judged alone gets anything but an error of its own."""
    text = ClientText(DRAFT)
    req = make_request(segmenter="mine", output=(), client=text, **{field: "x"})
    r = RequestRound(req, req.state, row=0, seq_len=1, bonus_token=11, output_len=0)
    bounds = Bounds(context_len=1000, num_free=900, num_slots=1000, max_rows=900)
    segmenting = Segmenting(serve(errors).config, TEXTS, errors.note)
    if field == "draft":
        draft_of(r, segmenting, bounds)
        assert (r.draft.tokens, r.boundaries) == (DRAFT, ())
    else:
        with pytest.raises(Refusal, match="because the segmenter 'mine' failed on a"):
            draft_of(r, segmenting, bounds)
    assert errors.counts == {("segmenter", "mine"): 1}


def test_verdict_rows_alone_go_to_the_judge(errors):
    """Red if a judge sees rows that are none of its own."""
    seen = []

    def judge(logits, asked):
        seen.append(len(logits))
        return [1.0] * len(asked)

    server = serve(errors, judge)
    verify = server.target.verify

    def with_more_rows(round, plan):
        output = verify(round, plan)
        output.logits = torch.cat([output.logits, torch.zeros(3, len(TEXTS))])
        return output

    server.target.verify = with_more_rows
    server.round(make_request(), make_request("exact"))
    assert seen == [2]
