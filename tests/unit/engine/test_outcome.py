"""Following the target: which rows the LM head is asked for, and what comes of them.

Cuts by each request's own options."""

import random
import weakref
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.cli.trace import summary
from sglang_parse.engine import outcome
from sglang_parse.engine.outcome import (
    WAVE_ROWS,
    WAVE_WIDTH,
    choose_cut_of,
    decode,
    follow_target,
    record_of,
    suffix_scores,
)
from sglang_parse.engine.shown import lay_out
from sglang_parse.judging.decide import (
    Cut,
    Decision,
    decide,
    exact_cut,
    verdict_scores,
)
from sglang_parse.judging.judges import question_scores
from sglang_parse.options.request import RequestOptions
from sglang_parse.options.server import ParseConfig
from sglang_parse.reporting.report import RequestReport
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import (
    Kept,
    RequestRound,
    Round,
    Segments,
    Verdict,
)
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl import sampling
from sglang_parse.sgl.fast_paths import FastPaths
from sglang_parse.verify import drawing
from sglang_parse.verify.model import TargetModel
from sglang_parse.verify.output import PassOutput

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
    paths = FastPaths()

    def __init__(self, own: list[int]) -> None:
        self.own = own
        self.asked: list[list[int]] = []
        self.logits: list[weakref.ref] = []

    def logits_of(self, output, rows):
        self.asked.append(list(rows))
        ids = torch.tensor([self.own[r] for r in rows])
        logits = torch.nn.functional.one_hot(ids, VOCAB).float()
        self.logits.append(weakref.ref(logits))
        return logits


def record(options, seq_len: int = 5, draft=(), **more) -> RequestRound:
    state = RequestState(options, frozenset(), None, report=None)
    return RequestRound(
        None, state, 0, seq_len, 0, output_len=1, draft=Draft(tuple(draft)), **more
    )


@pytest.fixture
def follow(monkeypatch):
    """Requests of (seq_len, draft, cut) and the target's own tokens behind each of
    their rows -> the round followed, and the rows asked for."""
    info = SimpleNamespace(apply_logits_bias=lambda logits: None)
    monkeypatch.setattr(drawing, "expand_rows", lambda *_: info)
    monkeypatch.setattr(sampling, "agree_across_ranks", lambda: None)

    def run(requests, own, top_nums=None):
        batch = SimpleNamespace(
            seq_lens=torch.tensor([r[0] for r in requests]),
            sampling_info=SimpleNamespace(),
            return_logprob=True,
            top_logprobs_nums=top_nums or [0] * len(requests),
            token_ids_logprobs=[None] * len(requests),
        )
        records = [record(None, n, draft) for n, draft, _ in requests]
        cuts = {id(r): cut for r, (*_, cut) in zip(records, requests, strict=True)}
        monkeypatch.setattr(outcome, "choose_cut_of", lambda r: cuts[id(r)])
        round = Round(batch, records, output=PassOutput(None, None))
        lay_out(round)
        verifier = Verifier([t for row in own for t in row])
        follow_target(round, TargetModel(verifier, slots=None))
        assert not any(logits() is not None for logits in verifier.logits)
        return round, verifier.asked

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
    round, asked = follow(requests, own, top_nums)
    rows = [row for wave in asked for row in wave]
    for i, ((seq_len, draft, cut), tokens) in enumerate(
        zip(requests, own, strict=True)
    ):
        r = round.requests[i]
        expected = decide(cut, tuple(draft), [tokens[j] for j in cut.rows])
        assert r.decision == expected
        root = r.root_row
        mine = [r - root for r in rows if root <= r <= root + len(draft)]
        assert mine == cut.rows[: len(mine)]
        same = [j < len(draft) and draft[j] == tokens[j] for j in cut.rows]
        needed = [*same, False].index(False) + 1
        assert min(needed, len(cut.rows)) <= len(mine) < needed + WAVE_WIDTH[1]
        # Where its rows went among all that were sampled.
        logprobs = round.sampled.next_token_logprobs[torch.tensor(r.kept.places)]
        assert logprobs.tolist() == [seq_len + j for j in mine]
        if top_nums[i]:
            lists = round.sampled.next_token_top_logprobs_val
            found = [lists[p].tolist() for p in r.kept.places]
            assert found == [[seq_len + j] * 2 for j in mine]


def test_requests_with_and_without_top_logprobs_part_after_a_wave(follow):
    """Red if a wave in which nobody asked for a list stops the scheduler."""
    draft = [3] * 40
    requests = [(5, draft, exact_cut(40))] * 2
    own = [[9, *draft], [*draft, 1]]
    round, asked = follow(requests, own, [2, 0])
    assert len(asked) == 2 and len(asked[1]) == 41 - WAVE_WIDTH[1]
    lists = round.sampled.next_token_top_logprobs_val
    first, second = round
    assert lists[first.kept.places[0]].tolist() == [5, 5]
    # SGLang asks every row for its list (managers/utils.py), tensors as they are.
    assert [lists[p].tolist() for p in second.kept.places] == [[]] * 41


@pytest.mark.parametrize("num_requests", [1, 16, 64, 500])
def test_no_call_of_the_lm_head_grows_with_the_window(follow, num_requests):
    """Red if a round followed token by token makes a window x vocabulary tensor, at
    once or (see the fixture) by keeping its parts."""
    draft = list(range(40)) * 10
    requests = [(5, draft, exact_cut(400))] * num_requests
    _, asked = follow(requests, [[*draft, 1]] * num_requests)
    assert max(map(len, asked)) <= max(WAVE_ROWS, 8 * num_requests)
    assert sum(map(len, asked)) == 401 * num_requests


def test_usual_rounds_ask_the_lm_head_once(follow):
    """Red if a short window, 16 drafts and the token behind them, takes two calls."""
    requests = [(5, [1] * 16, exact_cut(16))] * 30
    _, asked = follow(requests, [[1] * 17] * 30)
    assert len(asked) == 1


def options(mode: str = "semantic", **settings) -> RequestOptions:
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(
            custom_params={"parse_mode": mode}, frequency_penalty=0,
            presence_penalty=0, repetition_penalty=1, min_new_tokens=0, logit_bias=None,
        ),
        input_embeds=None, positional_embed_overrides=None, grammar=None,
        custom_logit_processor=None, return_logprob=False, return_hidden_states=False,
    )  # fmt: skip
    return RequestOptions.of(req, ParseConfig(**settings))


def test_rows_behind_the_ends_of_answers_count_for_nothing():
    """Red if several plain steps in a row make an answer longer than asked for."""
    steps = [[11, 21], [12, 22], [13, 23]]
    target = SimpleNamespace(decode=lambda round, go_on: steps)
    requests = [record(None), record(None)]
    for r, max_new in zip(requests, (2, 9), strict=True):
        params = SimpleNamespace(max_new_tokens=max_new)
        r.req = SimpleNamespace(sampling_params=params)
    decode(Round(None, requests), target)
    accepted = [r.decision.accept_tokens for r in requests]
    assert accepted == [(11,), (21, 22, 23)]
    assert [len(r.kept.places) for r in requests] == [len(a) for a in accepted]


def test_choose_cuts_by_each_requests_own_options():
    """Red if a request is cut by its neighbour's mode, threshold or keep rule."""
    judged = [
        options(),
        options(threshold=0.2),
        options(keep_rule="longest", exact_tail=False),
    ]
    round = Round(None, [record(o, draft=(1,) * 6) for o in judged])
    for r in round:
        r.segments, r.verdict = Segments((2, 4)), Verdict((0.4, 0.9))
    round.requests += [record(options(m), draft=(1,) * 6) for m in ("exact", "off")]
    assert [choose_cut_of(r) for r in round] == [
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
        cuts = rng.sample(range(1, num + 1), rng.randint(0, min(4, num)))
        exact_end = rng.choice([0, 0, rng.randint(0, num)])
        ends = tuple(sorted(c for c in cuts if c > exact_end))
        own_options = options(
            keep_rule=rng.choice(["first-failure", "longest"]),
            exact_tail=rng.random() < 0.7,
        )
        r = record(own_options, draft=range(num))
        r.segments = Segments(ends, exact_end=exact_end)
        r.verdict = Verdict(tuple(rng.choice([0.1, 0.9]) for _ in ends))
        assert len(r.shown) == (ends[-1] if ends else num)
        cut = choose_cut_of(r)
        assert max(cut.rows) <= len(r.shown)
        if ends and all(s > 0.5 for s in r.verdict.scores):
            own = [r.draft.tokens[j] if j < num else 99 for j in cut.rows]
            decision = decide(cut, r.draft.tokens, own)
            kept = len(decision.accept_tokens) + len(decision.pending)
            assert kept == num + (ends[-1] == num)


def test_scores_go_to_the_requests_whose_rows_they_are():
    """Red if a request is judged by its neighbour's verdict, or by its neighbour's
    words for yes and no."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    pairs = [((3, 5),), ((3, 5), (7, 9)), ((1, 2),)]
    round = Round(None, [record(None, draft=(1,) * 6) for _ in pairs])
    for r, ids, ends in zip(round, pairs, [(2, 4), (), (1, 3, 6)], strict=True):
        r.state.judge = SimpleNamespace(suffix=(9,), verdict_ids=ids)
        r.segments = Segments(ends)
    errors: list[Exception] = []
    first, none, last = suffix_scores(round, logits, question_scores, errors.append)
    assert none == ()
    for scores, rows, ids in (
        (first, logits[:2], pairs[0]),
        (last, logits[2:], pairs[2]),
    ):
        expected = verdict_scores(rows, [ids] * len(rows))
        torch.testing.assert_close(torch.tensor(scores), expected)
    assert not errors


def test_a_report_names_who_wrote_what():
    """Red if tokens of one drafter, or of the client, count as another's in reports."""
    r = record(None, segments=Segments((4,), exact_end=3))
    r.draft = Draft((1,), num_client=1)
    r.draft = r.draft.extended("eagle3", (2, 3), ended=False, token_level=True)
    r.draft = r.draft.extended("model", (4, 5, 6), ended=False, token_level=False)
    r.verdict = Verdict((0.9,))
    r.kept = Kept(decision=Decision((1, 2, 3, 4, 9), 4, 0, (6,)))
    found = record_of(r)
    assert found.num_client == 1
    assert [found.drafted(name) for name in ("eagle3", "model")] == [2, 3]
    assert (found.exact_end, found.num_judged, found.num_matched) == (3, 4, 0)
    assert (found.boundaries, found.scores, found.output_len) == ((4,), (0.9,), 1)
    assert found.draft_tokens == (1, 2, 3, 4, 5, 6)


def test_a_report_says_why_rounds_were_not_judged():
    """Red if who reads a report has to look for the reason in the server's log."""
    told = "verdicts do not pay here: 1.3x against 1.6x"
    r = record(SimpleNamespace(mode="semantic"))
    exact = record(SimpleNamespace(mode="exact"))
    for one in (r, exact):
        one.draft, one.kept = Draft((1,)), Kept(decision=Decision((9,), 0, 0, ()))
    assert record_of(exact, told).not_judged == ""
    report = RequestReport("semantic", "", want_segments=False)
    report.record(record_of(r, told))
    report.record(record_of(r))
    found = report.as_dict([9, 9], str)
    assert found["not_judged"] == {"rounds": 1, "reason": told}
    assert told in summary(found)
    assert "not_judged" not in RequestReport("off", "", False).as_dict([], str)
