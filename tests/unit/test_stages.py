"""Following the target: which rows the LM head is asked for, and what comes of them."""

import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from sglang_parse import sampling, stages
from sglang_parse.decide import Cut, decide, exact_cut
from sglang_parse.plan import build_verify_plan
from sglang_parse.stages import WAVE_ROWS, WAVE_WIDTH, TargetStages
from sglang_parse.state import RoundDraft
from sglang_parse.verify import PassOutput

VOCAB = 50


def sampler(output, info, return_logprob, top_nums, token_ids, positions):
    """Greedy; a row's position stands for its logprob. As SGLang's, it makes a list
    of tensors, and only where some row of the call asked for it."""
    output.next_token_logprobs = positions.float()
    if any(top_nums):
        pairs = zip(positions.tolist(), top_nums, strict=True)
        output.next_token_top_logprobs_val = [torch.tensor([p] * k) for p, k in pairs]
    return output.next_token_logits.argmax(-1)


class Verifier:
    """The target's own token behind each row of the pass, as logits; notes the rows
    that the LM head was asked for."""

    runner = SimpleNamespace(sampler=sampler)

    def __init__(self, own: list[int]) -> None:
        self.own = own
        self.asked: list[list[int]] = []
        self.logits: list[weakref.ref] = []

    def logits_at(self, output, rows):
        self.asked.append(list(rows))
        ids = torch.tensor([self.own[r] for r in rows])
        logits = torch.nn.functional.one_hot(ids, VOCAB).float()
        self.logits.append(weakref.ref(logits))
        return logits


@pytest.fixture
def follow(monkeypatch):
    """Requests of (seq_len, draft, cut) and the target's own tokens behind each of
    their rows -> decisions, sampled rows, and the rows asked for."""
    info = SimpleNamespace(apply_logits_bias=lambda logits: None)
    monkeypatch.setattr(stages, "expand_rows", lambda *_: info)
    monkeypatch.setattr(sampling, "agree_across_ranks", lambda: None)

    def run(requests, own, top_nums=None):
        plan = build_verify_plan(
            seq_lens=[r[0] for r in requests],
            bonus_tokens=[0] * len(requests),
            draft_tokens=[r[1] for r in requests],
            boundaries=[()] * len(requests),
            suffix_tokens=[()] * len(requests),
        )
        verifier = Verifier([t for row in own for t in row])
        target = TargetStages.__new__(TargetStages)
        target.verifier, target.pinned_agreement = verifier, None
        batch = SimpleNamespace(
            seq_lens=torch.tensor(plan.seq_lens),
            sampling_info=None,
            return_logprob=True,
            top_logprobs_nums=top_nums or [0] * len(requests),
            token_ids_logprobs=[None] * len(requests),
        )
        decisions, sampled = target.follow_target(
            batch,
            plan,
            PassOutput(None, None),
            [r[2] for r in requests],
            [RoundDraft(tuple(r[1])) for r in requests],
            [None] * len(requests),
        )
        assert not any(logits() is not None for logits in verifier.logits)
        return decisions, sampled, plan, verifier.asked

    return run


def random_request(rng: random.Random):
    draft = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 7, 8, 40, 90]))]
    own = [*draft, rng.randrange(VOCAB)]
    for _ in range(rng.choice([0, 0, 1, 2])):
        own[rng.randrange(len(own))] = rng.randrange(VOCAB)
    cut = exact_cut(len(draft))
    if rng.random() < 0.5:
        kept = rng.randint(0, len(draft))
        cut = Cut(kept, rng.randint(kept, len(draft)), False, 0, rng.randint(0, kept))
    return (rng.randint(1, 9), draft, cut), own


@pytest.mark.parametrize("seed", range(60))
def test_decisions_are_those_of_all_rows_at_once(follow, seed):
    """Red if a wave of rows is decided by another's tokens, or a row is left out that
    a decision needs, or one behind the first difference is computed."""
    rng = random.Random(seed)
    drawn = [random_request(rng) for _ in range(rng.choice([1, 3, 80]))]
    requests, own = zip(*drawn, strict=True)
    top_nums = [rng.choice([0, 0, 2]) for _ in requests]
    decisions, sampled, plan, asked = follow(requests, own, top_nums)
    rows = [row for wave in asked for row in wave]
    for i, ((seq_len, draft, cut), tokens) in enumerate(
        zip(requests, own, strict=True)
    ):
        expected = decide(cut, tuple(draft), [tokens[j] for j in cut.rows])
        assert decisions[i] == expected
        root = plan.root_rows[i]
        mine = [r - root for r in rows if root <= r <= root + len(draft)]
        assert mine == cut.rows[: len(mine)]
        same = [j < len(draft) and draft[j] == tokens[j] for j in cut.rows]
        needed = [*same, False].index(False) + 1
        assert min(needed, len(cut.rows)) <= len(mine) < needed + WAVE_WIDTH[1]
        # Where its rows went among all that were sampled.
        logprobs = sampled.output.next_token_logprobs[torch.tensor(sampled.places[i])]
        assert logprobs.tolist() == [seq_len + j for j in mine]
        if top_nums[i]:
            lists = sampled.output.next_token_top_logprobs_val
            assert [lists[p].tolist() for p in sampled.places[i]] == [
                [seq_len + j] * 2 for j in mine
            ]


def test_requests_with_and_without_top_logprobs_part_after_a_wave(follow):
    """Red if a wave in which nobody asked for a list stops the scheduler."""
    draft = [3] * 40
    requests = [(5, draft, exact_cut(40))] * 2
    own = [[9, *draft], [*draft, 1]]
    _, sampled, _, asked = follow(requests, own, [2, 0])
    assert len(asked) == 2 and len(asked[1]) == 41 - WAVE_WIDTH[1]
    lists = sampled.output.next_token_top_logprobs_val
    assert lists[sampled.places[0][0]].tolist() == [5, 5]
    # SGLang asks every row for its list (managers/utils.py), tensors as they are.
    assert [lists[p].tolist() for p in sampled.places[1]] == [[]] * 41


@pytest.mark.parametrize("num_requests", [1, 16, 64, 500])
def test_no_call_of_the_lm_head_grows_with_the_window(follow, num_requests):
    """Red if a round followed token by token makes a window x vocabulary tensor, at
    once or (see the fixture) by keeping its parts."""
    draft = list(range(40)) * 10
    requests = [(5, draft, exact_cut(400))] * num_requests
    _, _, _, asked = follow(requests, [[*draft, 1]] * num_requests)
    assert max(map(len, asked)) <= max(WAVE_ROWS, 8 * num_requests)
    assert sum(map(len, asked)) == 401 * num_requests


def test_usual_rounds_ask_the_lm_head_once(follow):
    """Red if a short window, 16 drafts and the token behind them, takes two calls."""
    requests = [(5, [1] * 16, exact_cut(16))] * 30
    _, _, _, asked = follow(requests, [[1] * 17] * 30)
    assert len(asked) == 1
