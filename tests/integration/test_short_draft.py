"""A draft model that reads less than its target: it drafts as far as it reads."""

import pytest

from tests.integration.conftest import SHORT
from tests.support.client import outcome, report

pytestmark = pytest.mark.own_server
EXACT = {"parse_mode": "exact"}


@pytest.fixture
def short(pool):
    server = pool.get("short")
    yield server
    assert server.is_alive(), "the test left the server dead"


def test_requests_go_on_without_the_draft(short, target, prompts):
    """Red if a token behind what the draft reads differs from the target's, if the
    draft model writes there, or if nobody says that it does not or writes instead."""
    prompts = prompts[:8]
    expected = target.generate_all(prompts, 8)
    found = short.generate_all(prompts, 8, custom=EXACT)
    assert list(map(outcome, found)) == list(map(outcome, expected))
    for one, prompt in zip(found, prompts, strict=True):
        told = report(one)
        is_long = len(prompt) + len(one["output_ids"]) > SHORT
        assert told.get("fallback", "") == ("draft_context" if is_long else "")
        # The head writes where the draft cannot.
        assert (told["kept_by"].get("eagle3", 0) > 0) or not is_long
    judged = [report(one)["kept_by"] for one in short.generate_all(prompts, 8)]
    for kept_by, prompt in zip(judged, prompts, strict=True):
        assert kept_by.get("model", 0) <= max(0, SHORT - len(prompt))
    assert any(kept_by.get("model") for kept_by in judged)


def test_judged_requests_cross_the_line_alone(short, prompts):
    """Red if the verdicts or drafts of a short request change once a longer one has
    passed what the draft reads, or while it does."""
    prompts = prompts[:6]
    lengths = [max(1, SHORT - len(prompt) - 10) for prompt in prompts]
    cases = [(p, {"max_new_tokens": n}) for p, n in zip(prompts, lengths, strict=True)]
    before = short.run_all(cases, 1)
    mixed = [case for one in cases for case in (one, (one[0], {}))]
    during, after = short.run_all(mixed, 2)[::2], short.run_all(cases, 1)
    for first, *others in zip(before, during, after, strict=True):
        for one in others:
            assert outcome(one) == outcome(first)
            assert report(one) == report(first)
