"""The benchmark switches that pin the kept share of drafts and the agreement."""

import logging

import pytest

from sglang_parse.engine.outcome import _agreed
from sglang_parse.engine.simulated import (
    ACCEPT_ENV,
    FREE_ENV,
    KEEP_ENV,
    PinnedAgreement,
    PinnedVerdicts,
    pinned_agreement,
    pinned_verdicts,
    remembered_verdicts,
)
from sglang_parse.judging.decide import (
    Cut,
    count_agreeing,
    count_valid_segments,
    exact_cut,
)
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round import RequestRound


@pytest.mark.parametrize("fraction", [0.0, 0.33, 0.5, 0.9, 1.0])
def test_kept_share_is_the_fraction_in_the_long_run(fraction):
    """Red if segments round the kept share up or down for good."""
    pinned = PinnedVerdicts(lambda: fraction)
    boundaries = tuple(range(16, 257, 16))
    kept = 0
    for _ in range(100):
        scores = pinned.scores(boundaries, 256)
        valid = count_valid_segments(scores, threshold=0.5, keep_rule="first-failure")
        assert valid == scores.count(1.0)
        kept += boundaries[valid - 1] if valid else 0
    assert kept / 25600 == pytest.approx(fraction, abs=16 / 25600)


def test_draft_without_boundaries_keeps_nothing_yet():
    """Red if a draft that has no boundary breaks the round."""
    pinned = PinnedVerdicts(lambda: 0.5)
    assert pinned.scores((), 10) == ()
    assert pinned.scores((5, 10), 10) == (1.0, 1.0)


def test_off_unless_asked_for(monkeypatch, caplog):
    """Red if production servers make verdicts up."""
    monkeypatch.delenv(KEEP_ENV, raising=False)
    monkeypatch.delenv(FREE_ENV, raising=False)
    with caplog.at_level(logging.WARNING):
        assert pinned_verdicts() is remembered_verdicts() is None
    assert not caplog.records


def test_loud_when_on(monkeypatch, caplog):
    """Red if a server runs with made-up verdicts and its log does not say so."""
    monkeypatch.setenv(KEEP_ENV, "0.9")
    with caplog.at_level(logging.WARNING):
        pinned = pinned_verdicts()
        monkeypatch.setenv(FREE_ENV, "1")
        assert remembered_verdicts() is not None
    assert pinned is not None and pinned.fraction() == 0.9
    assert "VERDICTS ARE MADE UP" in caplog.text
    assert "VERDICTS ARE REMEMBERED" in caplog.text


@pytest.mark.parametrize("value", ["", "90%", "1.5", "-0.1", "nan"])
def test_bad_value_is_refused(monkeypatch, value):
    """Red if a typing error silently measures something else."""
    monkeypatch.setenv(KEEP_ENV, value)
    with pytest.raises(ValueError, match=f"{KEEP_ENV} is "):
        pinned_verdicts()


def test_a_file_is_read_again_and_again(monkeypatch, tmp_path):
    """Red if a running server cannot be told another share, or a wrong one starts."""
    file = tmp_path / "keep"
    monkeypatch.setenv(KEEP_ENV, f"@{file}")
    with pytest.raises(FileNotFoundError):
        pinned_verdicts()
    file.write_text("2\n")
    with pytest.raises(ValueError, match=f"{KEEP_ENV} is '2'"):
        pinned_verdicts()
    file.write_text("1\n")
    pinned = pinned_verdicts()
    assert pinned.scores((4, 8), 8) == (1.0, 1.0)
    file.write_text("0.5\n")
    assert pinned.scores((4, 8), 8) == (1.0, 0.0)
    assert pinned.scores((), 100) == ()
    file.write_text("0\n")
    assert pinned.scores((4, 8), 8) == (0.0, 0.0)


@pytest.mark.parametrize("length", [1.0, 2.5, 3.69, 6.0])
def test_a_pass_gives_the_pinned_tokens_in_the_long_run(length):
    """Red if fractions are rounded for good, or the target agrees past its share."""
    pinned, given = PinnedAgreement(lambda: length), 0
    for i in range(200):
        draft = [i % 3, 1, 0, 5, 6]
        target = pinned.follow(draft, [9, 1, 0, 5, 6, 7])
        assert len(target) == 6
        assert all(token >= 0 for token in target)
        given += count_agreeing(draft, target) + 1
    assert given / 200 == pytest.approx(length, abs=0.01)


def test_what_a_draft_is_too_short_for_is_not_owed():
    """Red if one long draft pays for all the short ones before it."""
    pinned = PinnedAgreement(lambda: 4.0)
    for _ in range(10):
        assert pinned.follow([3], [8, 9]) == [3, 9]
    draft = list(range(20))
    assert count_agreeing(draft, pinned.follow(draft, draft)) == 3


def test_agreement_is_off_unless_asked_for_and_loud(monkeypatch, caplog):
    """Red if production servers make tokens up, or a log does not say so."""
    monkeypatch.delenv(ACCEPT_ENV, raising=False)
    with caplog.at_level(logging.WARNING):
        assert pinned_agreement() is None
        assert not caplog.records
        monkeypatch.setenv(ACCEPT_ENV, "3.69")
        pinned = pinned_agreement()
    assert pinned is not None and pinned.accept_length() == 3.69
    assert "TOKENS ARE MADE UP" in caplog.text


@pytest.mark.parametrize("value", ["", "3,69", "0.9", "-1", "nan", "inf"])
def test_bad_agreement_is_refused(monkeypatch, value):
    """Red if a typing error silently measures something else."""
    monkeypatch.setenv(ACCEPT_ENV, value)
    with pytest.raises(ValueError, match=f"{ACCEPT_ENV} is "):
        pinned_agreement()


def agreed(cut: Cut, chosen: list[int], accept_length: float | None = 3.0) -> list[int]:
    """The target's tokens behind a draft of 1, 2, 3, 4, as the decision gets them."""
    draft = Draft((1, 2, 3, 4))
    r = RequestRound(None, None, 0, 5, 0, output_len=1, draft=draft, cut=cut)
    r.chosen = chosen
    return _agreed(r, PinnedAgreement(lambda: accept_length) if accept_length else None)


def test_only_what_is_followed_token_by_token_is_pinned():
    """Red if the switch is not asked, makes up tokens in production, or touches what a
    verdict has decided."""
    target = [7, 7, 7, 7, 7]
    assert agreed(exact_cut(4), target) == [1, 2, 7, 7, 7]
    assert agreed(exact_cut(4), target, None) == target
    # Two leading tokens are the head's, two behind them are judged and kept.
    assert agreed(Cut(4, 4, False, exact_end=2), [7, 7, 7]) == [1, 2, 7]
    # A verdict failed at the first segment, or behind a kept one.
    assert agreed(Cut(0, 4, False, rejected_end=4), target) == target
    assert agreed(Cut(2, 4, False, rejected_end=4), [7, 7, 7]) == [7, 7, 7]
