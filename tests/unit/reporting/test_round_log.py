"""The line of PARSE in the log."""

from sglang_parse.reporting.report import RoundRecord
from sglang_parse.reporting.round_log import RoundLog


def test_a_line_tells_of_the_rounds_since_the_last_one():
    """Red if a share is of other tokens, or a round is told of twice."""
    log = RoundLog()
    assert log.line() == ""
    judged = RoundRecord(
        0, [1] * 7, [1] * 10, drafted_by=[("model", 10)],
        boundaries=[5, 9], scores=[0.9, 0.1], num_judged=5, num_matched=1,
    )  # fmt: skip
    log.add(judged)
    log.add_round("verdicts do not pay here: 1.3x against 1.6x")
    assert log.line() == (
        "drafted tokens: 10, kept: 60% (by verdict: 50%, equal to the target's own: "
        "10%), verdicts passed: 1 of 2, rounds not judged: 1 of 2 (verdicts do not pay "
        "here: 1.3x against 1.6x)"
    )
    assert log.line() == ""
    log.add_round()
    assert log.line() == "drafted tokens: 0, verdicts passed: 0 of 0"
