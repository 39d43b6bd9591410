"""The n-gram drafter in rounds of the engine, and alone."""

from types import SimpleNamespace

import pytest

from sglang_parse.drafting.ngram import CopyOutcome, NgramDrafter
from sglang_parse.options.server import ParseConfig
from sglang_parse.requests.round_records import RequestRound, Round
from tests.support.fake_engine import (
    VOCAB,
    FakeDrafter,
    FakeServer,
    FakeTarget,
    make_request,
)

PASSAGE = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27]


def quote(before):
    """A target that repeats the passage of its prompt for ever."""
    at = PASSAGE.index(before[-1]) if before[-1] in PASSAGE else len(PASSAGE) - 1
    return PASSAGE[(at + 1) % len(PASSAGE)]


def never_again(before):
    """A target whose text has no two tokens twice, for a while."""
    pairs = set(zip(before, before[1:], strict=False))
    return next(t for t in range(4, VOCAB) if (before[-1], t) not in pairs)


def alone(own, prompt, num):
    """What the target writes by itself."""
    tokens = [*prompt]
    while len(tokens) < len(prompt) + num:
        tokens.append(own(tuple(tokens)))
    return tokens[len(prompt) :]


def costs(server, *, row_s):
    """A virtual clock: a plain round takes 10 ms, each further row of a pass row_s."""
    target, clock = server.target, SimpleNamespace(now=0.0)

    def verify(round, plan):
        clock.now += 0.01 + row_s * (plan.num_verify_tokens - len(round))
        return FakeTarget.verify(target, round, plan)

    def decode(round, go_on):
        clock.now += 0.01
        return FakeTarget.decode(target, round, go_on)

    target.verify, target.decode = verify, decode
    server.engine.clock = lambda: clock.now
    return clock


def run(own, *, mode="exact", prompt=(*PASSAGE, 5), num=60, drafters=(), **settings):
    """Rounds until `num` tokens are out: the output, and the rounds."""
    settings = {"segmenter": "line", "adaptive": False} | settings
    config = ParseConfig(drafters="ngram", **settings)
    target = FakeTarget(own, lambda before: 0.9)
    ngram = NgramDrafter(VOCAB)
    server = FakeServer(target, [ngram, *drafters], config=config)
    costs(server, row_s=0.0005)
    req = make_request(mode, prompt=prompt, output=(own(prompt),), config=config)
    rounds = []
    while len(req.output_ids) < num:
        rounds.append(server.round(req))
    return req, rounds


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("own", [quote, never_again])
def test_exact_answers_are_the_targets_own(own, adaptive):
    """Red if a copied token stands that the target would not have written."""
    req, _ = run(own, adaptive=adaptive)
    prompt = (*PASSAGE, 5)
    assert req.output_ids == alone(own, prompt, len(req.output_ids))


def test_text_that_never_repeats_is_decoded_plainly():
    """Red if copies are drafted without a match."""
    req, rounds = run(never_again)
    assert not any(r.is_drafted for r in rounds)
    assert len(rounds) == len(req.output_ids) - 1


def test_copies_that_never_come_true_are_given_up():
    """Red if a match that never goes on is drafted again and again: each of its tokens
    is a row of the pass."""

    def own(before):
        """Three tokens that stood before, and behind them one that varies."""
        n = len(before)
        return (10, 11, 12, 13 + n // 4 * 7 % 26)[n % 4]

    prompt = (4, 10, 11, 12)
    config = ParseConfig(drafters="ngram", segmenter="line")
    target = FakeTarget(own, lambda before: 0.9)
    server = FakeServer(target, [NgramDrafter(VOCAB)], config=config)
    clock = costs(server, row_s=0.005)
    req = make_request("exact", prompt=prompt, output=(own(prompt),), config=config)
    while len(req.output_ids) < 2000:
        server.round(req)
    assert req.output_ids == alone(own, prompt, len(req.output_ids))
    assert clock.now < 1.02 * 0.01 * 2000


def test_a_model_and_copies_take_turns():
    """Red if the model drafts what can be copied, or copies keep the model from
    drafting what stood nowhere before."""
    new = [28 + i * i % 11 for i in range(40)]

    def own(before):
        n = len(before) - len(PASSAGE) - 1
        return new[n] if 0 <= n < len(new) else quote(before)

    prompt = (*PASSAGE, 5)
    answer = alone(own, prompt, 400)
    model = FakeDrafter(lambda before: answer[len(before) - len(prompt) :])
    req, _ = run(
        own, num=200, drafters=[model], prompt=prompt, adaptive=False, window=16
    )
    assert req.output_ids == answer[: len(req.output_ids)]
    kept = req.state.report.drafters.kept
    assert kept["ngram"] > 100 and kept["model"] > 20


def one(tokens, num, *, stop=(), grammar=None, **more):
    """A request in a round in which the n-gram drafter may write `num` tokens."""
    req = make_request("exact", prompt=tokens[:-1], output=tokens[-1:], **more)
    req.state.stop_ids = frozenset(stop)
    r = RequestRound(req, req.state, 0, len(tokens) - 1, tokens[-1], 1, grammar=grammar)
    r.window, r.budgets = num, {"ngram": num}
    return r


def drafted(r, vocab=VOCAB):
    drafter = NgramDrafter(vocab)
    drafter.draft(Round(None, [r]))
    return r.draft.tokens


def test_a_copy_ends_before_what_may_not_stand():
    """Red if a stop token, an id without text or what a grammar refuses is copied."""
    text = [4, 5, 6, 7, 8, 9, 4, 5, 6]
    assert drafted(one(text, 5)) == (7, 8, 9, 4, 5)
    assert drafted(one(text, 5, stop=(9,))) == (7, 8)
    assert drafted(one(text, 5), vocab=8) == (7,)
    grammar = SimpleNamespace(is_dead=False, walk=lambda tokens: 1)
    assert drafted(one(text, 5, grammar=grammar)) == (7,)
    assert drafted(one(text, 0)) == ()
    assert not NgramDrafter(VOCAB).can_draft(one(text, 5, compose=False))


def test_outcomes_are_told_though_nobody_drafts():
    """Red if a copy's worth is learnt only from what was drafted."""
    drafter = NgramDrafter(VOCAB)
    r = one([4, 5, 6, 7, 8, 9, 4, 5, 6], 5)
    assert drafter.evidence(r) == 3 and drafter.take_outcomes() == []
    r.req.output_ids += [7, 8]
    assert drafter.evidence(r) == 5
    assert drafter.take_outcomes() == [CopyOutcome(3, 5, False)]
    r.req.output_ids += [9, 30, 31]
    assert drafter.evidence(r) == 0
    assert drafter.take_outcomes() == [CopyOutcome(5, 6, True)]
    r.state.ready = (4, 5, 6)
    assert drafter.evidence(r) == 3


def test_a_prompt_that_cannot_be_read_costs_the_copies_alone():
    """Red if an id of a prompt that no index can hold ends the round of everybody."""
    drafter = NgramDrafter(VOCAB)
    r = one([4, 5, 6, 1 << 80, 4, 5, 6], 5)
    assert drafter.evidence(r) == drafter.evidence(r) == 0
    assert r.state.failed_drafters == {"ngram"}


def test_it_is_made_where_it_is_listed():
    """Red if it drafts unasked, or the flag does not reach it."""

    def made(**settings):
        config = ParseConfig(**settings)
        return NgramDrafter.create(SimpleNamespace(config=config, vocab_size=9))

    assert made() is None and made(drafters="model") is None
    assert made(drafters="ngram,model").max_tokens == 64
