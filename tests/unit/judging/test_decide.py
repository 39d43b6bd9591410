"""Scores, cuts and decisions equal the slow oracle."""

import random

import pytest
import torch

from sglang_parse.judging.decide import (
    Cut,
    choose_cut,
    count_valid_segments,
    decide,
    exact_cut,
    verdict_scores,
)
from tests.support.reference import exact_output, round_output, verdict_score

RULES = ("first-failure", "longest")


@pytest.mark.parametrize(
    "rows",
    [
        [((3, 5),)] * 4,
        [((3, 5), (0, 7))] * 2 + [((1, 2),)] * 3,
        [((0, 1),), ((11, 0), (4, 6), (8, 9)), ((3, 5), (1, 2)), ((0, 1),)],
    ],
    ids=["the same", "two judges", "one each"],
)
def test_verdict_scores_equal_the_ratio_of_each_row(rows):
    """Red if a row is read at another's tokens, padded pairs count (id 0 does), pairs
    are averaged, or yes and no change places."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(rows), 12, generator=generator) * 4
    pairs = zip(logits.tolist(), rows, strict=True)
    expected = torch.tensor([verdict_score(row, own) for row, own in pairs])
    scores = verdict_scores(logits, rows)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)


def test_batched_verdict_scores_are_computed_in_float32():
    """Red if rows with verdict tokens of their own are rated in the model's dtype."""
    logits = torch.tensor([[2.0, 1.984375]] * 2, dtype=torch.bfloat16)
    scores = verdict_scores(logits, [((0, 1),), ((1, 0),)])
    assert scores.tolist() == pytest.approx([0.503906, 0.496094], abs=1e-5)


def test_batched_verdict_scores_of_no_rows_are_none():
    """Red if a round without verdicts cannot be scored."""
    assert verdict_scores(torch.empty(0, 9), []).shape == (0,)


def test_verdict_scores_of_extreme_logits_are_finite():
    """Red if probabilities are formed before the ratio (0/0)."""
    logits = torch.tensor([[-9000.0, -9001.0, 9000.0], [500.0, -500.0, 0.0]])
    scores = verdict_scores(logits, [((0, 1),)] * 2)
    torch.testing.assert_close(scores, torch.tensor([0.7310586, 1.0]))


@pytest.mark.parametrize("rule", RULES)
def test_threshold_ends_of_the_range(rule):
    """Red if 0 rejects a score of 0, equality fails, or 2 lets a score of 1 pass."""
    scores = [0.0, 1.0, 0.0]
    assert count_valid_segments(scores, threshold=0.0, keep_rule=rule) == 3
    assert count_valid_segments(scores, threshold=2.0, keep_rule=rule) == 0
    assert count_valid_segments([1.0, 1.0], threshold=1.0, keep_rule=rule) == 2


def test_cut_runs_exact_tail_through_first_rejected_segment_only():
    """Red if the tail ends at the cut or runs into the next segment."""
    cut = choose_cut(
        [0.9, 0.1, 0.9],
        [2, 5, 7],
        num_draft_tokens=9,
        threshold=0.5,
        keep_rule="first-failure",
        exact_tail=True,
    )
    assert cut == Cut(2, 5, reuse_tail=False, rejected_end=5)


def random_round(rng: random.Random) -> dict:
    num_draft = rng.choice([0, 1, 3, 8])
    num_cuts = rng.randint(0, min(4, num_draft))
    draft = [rng.randrange(3) for _ in range(num_draft)]
    return {
        "draft": draft,
        # A target that often agrees, and has one token more to say.
        "target": [t if rng.random() < 0.7 else 3 for t in draft] + [rng.randrange(3)],
        "boundaries": sorted(rng.sample(range(1, num_draft + 1), num_cuts)),
        "scores": [round(rng.random(), 2) for _ in range(num_cuts)],
        "threshold": rng.choice([0.0, 0.3, 0.5, 1.0, 2.0]),
        "keep_rule": rng.choice(RULES),
        "exact_tail": rng.random() < 0.6,
    }


@pytest.mark.parametrize("seed", range(300))
def test_round_equals_oracle(seed):
    """Red upon any change of cut choice, exact tail or reuse of the tail."""
    case = random_round(random.Random(seed))
    accepted, judged, matched, pending = round_output(**case)
    cut = choose_cut(
        case["scores"],
        case["boundaries"],
        num_draft_tokens=len(case["draft"]),
        threshold=case["threshold"],
        keep_rule=case["keep_rule"],
        exact_tail=case["exact_tail"],
    )
    rows = case["target"][cut.num_kept : cut.tail_end + 1]
    decision = decide(cut, case["draft"], rows)
    assert list(decision.accept_tokens) == accepted
    assert (decision.num_judged, decision.num_matched) == (judged, matched)
    assert list(decision.pending) == pending


@pytest.mark.parametrize("seed", range(100))
def test_exact_mode_equals_oracle(seed):
    """Red if exact mode emits anything but the target's own tokens."""
    case = random_round(random.Random(1000 + seed))
    decision = decide(exact_cut(len(case["draft"])), case["draft"], case["target"])
    assert list(decision.accept_tokens) == exact_output(case["draft"], case["target"])
    assert (
        list(decision.accept_tokens) == (case["target"][: len(decision.accept_tokens)])
    )
    assert decision.num_judged == 0
    assert decision.pending == ()


@pytest.mark.parametrize("seed", range(200))
def test_recovering_head_follows_the_target_then_the_verdicts(seed):
    """Red if a verdict keeps what the target, recovering, would have written else."""
    rng = random.Random(seed)
    num = rng.randint(1, 8)
    draft = [rng.randint(1, 3) for _ in range(num)]
    target = [rng.randint(1, 3) for _ in range(num + 1)]
    head_end = rng.randint(0, num)
    target[:head_end] = [
        t if rng.random() < 0.2 else d
        for d, t in zip(draft[:head_end], target, strict=False)
    ]
    later = range(head_end + 1, num + 1)
    boundaries = sorted(rng.sample(later, rng.randint(0, len(later))))
    scores = [rng.choice((0.1, 0.9)) for _ in boundaries]
    settings = {"threshold": 0.5, "keep_rule": rng.choice(RULES)}
    cut = choose_cut(
        scores, boundaries, num_draft_tokens=num, exact_tail=True, exact_end=head_end,
        **settings,
    )  # fmt: skip
    decision = decide(cut, draft, [target[r] for r in cut.rows])
    wrong = [j for j in range(head_end) if draft[j] != target[j]]
    if wrong:
        assert decision.accept_tokens == (*draft[: wrong[0]], target[wrong[0]])
        assert (decision.num_judged, decision.pending) == (0, ())
        assert not cut.failed_at_verdict(decision)
        return
    # The head stood: as if the draft began behind it.
    rest = choose_cut(
        scores, [b - head_end for b in boundaries], num_draft_tokens=num - head_end,
        exact_tail=True, **settings,
    )  # fmt: skip
    after = decide(rest, draft[head_end:], [target[head_end + r] for r in rest.rows])
    assert decision.accept_tokens == (*draft[:head_end], *after.accept_tokens)
    assert decision.num_judged == head_end + after.num_judged
    assert decision.pending == after.pending
    assert cut.failed_at_verdict(decision) == rest.failed_at_verdict(after)
