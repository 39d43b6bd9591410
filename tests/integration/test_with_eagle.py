"""PARSE composed with EAGLE-3: never another token than the target's in exact rounds,
and never more passes than without it."""

import os
from types import SimpleNamespace

import pytest

from sglang_parse.embedded.task import make_problems
from tests.support.client import chat_ids, check_hidden_states, outcome, report

NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "12"))
# Of those, how many are asked one at a time.
NUM_ALONE = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "4"))


SAME = (
    {"regex": "Step 1: [a-z ]{3,9}[.]"},
    {"top": {"return_logprob": True}},
)


STATES = {"top": {"return_hidden_states": True}, "max_new_tokens": 30}


def long_prompt(prompts) -> list[int]:
    return [token for prompt in prompts[:24] for token in prompt][:700]


@pytest.fixture(scope="module")
def reference(pool, prompts, tokenizer):
    """What the servers without a head say; they make room for those with one."""
    parse = pool.get("parse").generate_all(easy_prompts(tokenizer), 4)
    target = pool.get("target")
    target.flush()  # cached positions have no hidden states
    return SimpleNamespace(
        states=target.generate(prompts[7], **STATES),
        parse_passes=total(parse, "target_passes"),
        answers=[outcome(r) for r in target.generate_all(prompts[:NUM], 8)],
        long=target.generate(long_prompt(prompts), max_new_tokens=60),
        same=[target.generate(prompts[2], max_new_tokens=24, **o) for o in SAME],
    )


@pytest.fixture(scope="module")
def expected(reference):
    return reference.answers


@pytest.fixture
def eagle(reference, pool):
    server = pool.get("eagle")
    yield server
    assert server.is_alive(), "the test left the server dead"


def easy_problems():
    return make_problems(40, seed=77)


def easy_prompts(tokenizer) -> list[list[int]]:
    return [chat_ids(tokenizer, p.prompt) for p in easy_problems()]


def total(results, name: str) -> int:
    return sum(report(r)[name] for r in results)


def accept_length(results) -> float:
    """Tokens a pass of the target, its own included; the prefill gives the first."""
    tokens = sum(len(r["output_ids"]) - 1 for r in results)
    return tokens / total(results, "target_passes")


@pytest.mark.parametrize("concurrency", [1, 16])
def test_exact_mode_equals_target(eagle, prompts, expected, concurrency):
    """Red if the head's drafts change a token, or its state runs out of step."""
    num = NUM if concurrency > 1 else NUM_ALONE
    results = eagle.generate_all(
        prompts[:num], concurrency, custom={"parse_mode": "exact"}
    )
    assert [outcome(r) for r in results] == expected[:num]
    assert total(results, "draft_tokens") == 0, "the draft model wrote"
    assert accept_length(results) > 3.0 or concurrency == 1


@pytest.mark.parametrize("recover", [1, "all"])
def test_nothing_valid_equals_target(eagle, prompts, expected, recover):
    """Red if a head's token or one behind it stands that the target did not choose."""
    custom = {"parse_threshold": 2.0, "parse_recover_segments": recover}
    results = eagle.generate_all(prompts[:6], 6, custom=custom)
    assert [outcome(r) for r in results] == expected[:6]
    num_tokens = sum(len(r["output_ids"]) for r in results)
    assert total(results, "eagle_kept_tokens") > num_tokens // 4
    assert {report(r)["mode"] for r in results} == {"semantic"}


def test_sampled_drafts_are_followed(eagle, prompts):
    """Red if sampled requests lose the head or its hidden states."""
    results = eagle.generate_all(
        prompts[:8], 4, custom={"parse_mode": "exact"}, temperature=0.7
    )
    assert accept_length(results) > 2.0


def test_fewer_passes_than_without_the_head(eagle, reference, tokenizer):
    """Red if composing costs passes or right answers."""
    results = eagle.generate_all(easy_prompts(tokenizer), 4)
    assert total(results, "target_passes") <= reference.parse_passes
    right = sum(
        r["text"].rstrip().endswith(f"Answer: {p.answer}")
        for r, p in zip(results, easy_problems(), strict=True)
    )
    assert right >= len(results) - 1


def test_switched_off_per_request(eagle, prompts, expected):
    """Red if a request that asks for no head is drafted by it."""
    custom = {"parse_mode": "exact", "parse_compose": False}
    results = eagle.generate_all(prompts[:4], 4, custom=custom)
    assert [outcome(r) for r in results] == expected[:4]
    assert total(results, "eagle_draft_tokens") == 0 < total(results, "draft_tokens")


@pytest.mark.combines("head", "radix cache")
def test_prefix_cached_without_the_head(eagle, prompts, expected):
    """Red if such a prefix gives a wrong token, or the head knows less of it than of
    one that was cached with it."""
    exact = {"parse_mode": "exact"}
    kept = []
    for before in (exact, {"parse_compose": False}):
        eagle.flush()
        eagle.generate(prompts[0], custom=before)
        again = eagle.generate(prompts[0], custom=exact)
        assert again["meta_info"]["cached_tokens"] > len(prompts[0]) // 2
        assert outcome(again) == expected[0]
        kept.append((report(again)["target_passes"], accept_length([again])))
    assert kept[0] == kept[1]
    # A request that goes on inside the cached answer.
    longer = [*prompts[0], *again["output_ids"][:20]]
    answers = [eagle.generate(longer, custom=c) for c in (exact, {"parse_mode": "off"})]
    assert outcome(answers[0]) == outcome(answers[1])
    assert accept_length(answers[:1]) > 1.5


def test_mixed_requests_equal_each_alone(eagle, prompts):
    """Red if a request is drafted, followed or cut by its neighbour's options."""
    kinds = [
        {"parse_mode": "exact"},
        {"parse_mode": "semantic"},
        {"parse_mode": "exact", "parse_compose": False},
        {"parse_threshold": 2.0},
        {"parse_draft": "Step 1: we take 8 + 6 and get 14.\n"},
        {"parse_prediction": "Step 1: we take 8 + 6 and get 14.\n"},
    ]
    cases = [(prompts[i], {"custom": kinds[i % len(kinds)]}) for i in range(14)]
    alone = [outcome(r) for r in eagle.run_all(cases, 1)]
    assert [outcome(r) for r in eagle.run_all(cases, 14)] == alone


def test_long_prompts_in_chunks(eagle, reference, prompts):
    """Red if the head's pairs break where a prefill is cut into chunks."""
    exact = {"parse_mode": "exact"}
    result = eagle.generate(long_prompt(prompts), custom=exact, max_new_tokens=60)
    assert result["output_ids"] == reference.long["output_ids"]


@pytest.mark.combines("head", "grammar")
@pytest.mark.parametrize("index", range(len(SAME)))
def test_grammar_and_logprobs_are_served_right(eagle, reference, prompts, index):
    """Red if logprobs or a grammar meet the head."""
    result = eagle.generate(
        prompts[2], max_new_tokens=24, custom={"parse_mode": "exact"}, **SAME[index]
    )
    assert outcome(result) == outcome(reference.same[index])


def test_hidden_states_equal_target(eagle, reference, prompts):
    """Red if a state is one of the head's inputs."""
    eagle.flush()
    result = eagle.generate(prompts[7], **STATES)
    check_hidden_states(result, reference.states, len(prompts[7]))


def test_head_alone_is_eagle3(pool, prompts, expected):
    """Red if a server with nothing but a head does not serve everyone by it."""
    server = pool.get("head-only")
    for concurrency in (1, 8):
        results = server.generate_all(prompts[:12], concurrency)
        assert [outcome(r) for r in results] == expected[:12]
        assert {report(r)["mode"] for r in results} == {"exact"}
        assert {report(r)["fallback"] for r in results} == {"no_draft_model"}
        assert accept_length(results) > 1.5
