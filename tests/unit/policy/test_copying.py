"""How long copies last, and for whom they are drafted."""

import random
from types import SimpleNamespace

import pytest

from sglang_parse.drafting.ngram import CopyOutcome
from sglang_parse.policy.copying import CopyPlanner, CopySurvival
from sglang_parse.policy.gate import Gate
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState


def test_survival_is_learnt_by_the_length_of_the_match():
    """Red if a copy that began as a short match and went on tells nothing of long ones,
    or the mean is not that of the copies seen."""
    rng = random.Random(0)
    chance = {k: 0.6 if k < 8 else 0.02 for k in range(400)}
    survival = CopySurvival()

    def lasts(start):
        end = start
        while end < 399 and rng.random() > chance[end]:
            end += 1
        return end

    for _ in range(4000):
        end = lasts(3)
        # Told in parts, as rounds go by.
        middle = min(end, 9)
        survival.observe(
            [CopyOutcome(3, middle, False)] * (middle > 3 and middle < end)
        )
        survival.observe([CopyOutcome(middle if middle < end else 3, end, True)])
    for start in (3, 12, 40):
        real = sum(min(lasts(start) - start, 32) for _ in range(4000)) / 4000
        assert sum(survival.lasts(start, 32)) == pytest.approx(real, rel=0.3)
    assert len(survival.lasts(12, 5)) == 5


def test_nothing_is_known_of_what_was_not_seen():
    """Red if a prior says that a long match ends as soon as a short one."""
    fresh = CopySurvival()
    means = [sum(fresh.lasts(2**k, 64)) for k in range(8)]
    assert means == sorted(means) and means[0] < 2 and means[-1] > 20


class Copies:
    """A copier with a match of `evidence` tokens for each request that has one."""

    name, max_tokens = "ngram", 64

    def evidence(self, r: RequestRound) -> int:
        return r.state.found

    def take_outcomes(self):
        return []


def planned(*requests, adaptive=True, judged=True, rate=1.0, round_ms=40.0, **more):
    """Budgets after copies were planned. requests: (evidence, window, fields)."""
    gate = Gate()
    costs, bs = gate.costs, len(requests)
    for _ in range(4):
        # A row costs a hundredth of a pass, a draft step a tenth.
        for x in (1, 8, 64, 512):
            costs.verify.add(10 + 0.1 * x, 1, x, bs)
            costs.draft.add(x, 1, x, x * bs, 0)
        costs.plain.add(10.0, 1, bs)
    gate.chosen = SimpleNamespace(rate=rate, ms=round_ms / len(requests))
    ranks = SimpleNamespace(agree_all=lambda lists: lists)
    planner = CopyPlanner(Copies(), gate, ranks)
    made = []
    for evidence, window, fields in requests:
        options = SimpleNamespace(mode=fields.pop("mode", "semantic"), window=256)
        state = RequestState(options, frozenset(), None, None, **fields)
        state.found = evidence
        r = RequestRound(SimpleNamespace(), state, 0, 10, 1, 5)
        r.limit, r.window, r.by_segments = 256, window, window > 0
        made.append(r)
    round = Round(None, made, judged=judged)
    planner.plan(round, adaptive=adaptive)
    return round, [r.budgets for r in made]


def test_a_long_match_is_copied():
    """Red if a quote waits for the model's draft."""
    round, (budgets,) = planned((64, 256, {}), rate=0.5)
    assert budgets["ngram"] == round.requests[0].window > 32


def test_a_model_that_gives_more_goes_on():
    """Red if a chance match takes the place of a draft that is nearly always valid."""
    round, (budgets,) = planned((3, 256, {}), rate=1.0)
    assert budgets == {} and round.judged and round.requests[0].window == 256


def test_in_a_round_of_others_only_he_copies_who_gets_more():
    """Red if one request's copy ends the drafts of all, or a short match takes a
    request's share of a judged round."""
    usual = [(0, 256, {})] * 6
    round, (long, short, *others) = planned(
        (64, 256, {}), (3, 256, {}), *((e, w, {}) for e, w, _ in usual),
        rate=4.0, round_ms=20.0,
    )  # fmt: skip
    assert long["ngram"] > 10 and short == {}
    assert round.judged and all(not one for one in others)


def test_what_is_pending_keeps_its_turn():
    """Red if a client's text, or the rest of a draft, is thrown away for a copy."""
    round, (budgets,) = planned((64, 5, {"draft": Draft((1, 2, 3))}), rate=0.01)
    assert budgets == {} and round.judged
    round, (first, second) = planned(
        (64, 5, {"draft": Draft((1, 2, 3))}), (64, 0, {}), rate=0.01
    )
    assert first == {} and second["ngram"] and round.judged


@pytest.mark.parametrize(
    ("mode", "window", "copies"),
    [("exact", 30, 64), ("semantic", 30, 0), ("semantic", 0, 64)],
)
def test_with_fixed_windows_copies_stand_where_single_tokens_are_followed(
    mode, window, copies
):
    """Red if copies depend on measured times, or take a judged draft's place."""
    _, (budgets,) = planned((9, window, {"mode": mode}), adaptive=False)
    assert budgets.get("ngram", 0) == copies
