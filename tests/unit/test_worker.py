"""The worker's pure helpers: one cut and one logprob need per request."""

import random
from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_parse.commit import SampledRows, build_result
from sglang_parse.config import ParseConfig
from sglang_parse.decide import Cut, Decision, decide
from sglang_parse.plan import build_verify_plan
from sglang_parse.request import RequestOptions
from sglang_parse.stages import choose_cuts, logprob_needs, shown_tokens
from sglang_parse.state import RequestState, RoundDraft


def options(mode: str = "semantic", **settings) -> RequestOptions:
    config = ParseConfig(mode=mode, **settings)
    names = ("threshold", "keep_rule", "segmenter", "window", "judge_suffix")
    names += ("recover_segments", "judge_every")
    return RequestOptions(
        mode=mode,
        exact_tail=config.exact_tail,
        compose=False,
        report=False,
        fallback="",
        **{n: getattr(config, n) for n in names},
    )


def state(mode: str, **settings) -> RequestState:
    return RequestState(options(mode, **settings), frozenset(), None, report=None)


def test_choose_cuts_by_each_requests_own_options():
    """Red if a request is cut by its neighbour's mode, threshold or keep rule."""
    plan = build_verify_plan(
        seq_lens=[5] * 5,
        bonus_tokens=[0] * 5,
        draft_tokens=[[1] * 6] * 5,
        boundaries=[(2, 4)] * 3 + [(), ()],
        suffix_tokens=[[9]] * 5,
    )
    states = [
        state("semantic"),
        state("semantic", threshold=0.2),
        state("semantic", keep_rule="longest", exact_tail=False),
        state("exact"),
        state("off"),
    ]
    scores = [(0.4, 0.9)] * 3 + [(), ()]
    drafts = [RoundDraft((1,) * 6)] * 5
    assert choose_cuts(plan, scores, states, drafts, [0] * 5) == [
        Cut(0, 2, False, rejected_end=2),
        Cut(4, 4, True),
        Cut(4, 4, True),
        Cut(0, 6, False),
        Cut(0, 6, False),
    ]


def test_no_decision_needs_what_the_target_is_not_shown():
    """Red if a row behind the last boundary is asked for: it is not in the pass; or if
    such tokens are lost, or shown, where every verdict passes."""
    rng = random.Random(5)
    for _ in range(500):
        num = rng.randint(1, 30)
        draft = RoundDraft(tuple(range(num)))
        cuts = rng.sample(range(1, num + 1), rng.randint(0, min(4, num)))
        head_end = rng.choice([0, 0, rng.randint(0, num)])
        ends = tuple(sorted(c for c in cuts if c > head_end))
        one = state(
            "semantic",
            keep_rule=rng.choice(["first-failure", "longest"]),
            exact_tail=rng.random() < 0.7,
        )
        scores = [tuple(rng.choice([0.1, 0.9]) for _ in ends)]
        (shown,) = shown_tokens([draft], [ends])
        assert len(shown) == (ends[-1] if ends else num)
        plan = build_verify_plan(
            seq_lens=[5],
            bonus_tokens=[0],
            draft_tokens=[shown],
            boundaries=[ends],
            suffix_tokens=[[9]],
        )
        (cut,) = choose_cuts(plan, scores, [one], [draft], [head_end])
        assert max(cut.rows) <= len(shown)
        if ends and all(s > 0.5 for s in scores[0]):
            own = [draft.tokens[j] if j < num else 99 for j in cut.rows]
            decision = decide(cut, draft.tokens, own)
            kept = len(decision.accept_tokens) + len(decision.pending)
            assert kept == num + (ends[-1] == num)


def test_logprob_needs_follow_the_rows():
    """Red if a row gets the logprob settings of another request."""
    batch = SimpleNamespace(
        return_logprob=True,
        top_logprobs_nums=[0, 5],
        token_ids_logprobs=[None, [3, 4]],
    )
    needs = logprob_needs(batch, [1, 1, 0])
    assert needs.top_logprobs_nums == [5, 5, 0]
    assert needs.token_ids_logprobs == [[3, 4], [3, 4], None]
    batch.return_logprob = False
    assert not logprob_needs(batch, [0]).return_logprob


def test_hidden_states_beside_tokens_decided_ahead():
    """Red if a request whose tokens were decided before this pass makes another's
    hidden states be looked for behind the pass, which stops the scheduler."""
    ahead = Decision(tuple(range(20)), 0, 0, ())
    decisions = [Decision((7,), 0, 0, ()), ahead]
    states = torch.tensor([[1.0], [2.0]])  # a plain round of two requests
    result = build_result(
        decisions,
        seq_lens=torch.tensor([5, 5]),
        num_draft_tokens=[0, 0],
        sampled=SampledRows([[0], [1]], LogitsProcessorOutput(None), states, [0, 1]),
        return_logprob=False,
        return_hidden_states=True,
    )
    assert result.logits_output.hidden_states[0].tolist() == [1.0]
    assert len(result.logits_output.hidden_states) == 2 * 20
