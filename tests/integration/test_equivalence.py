"""Where PARSE must say exactly what the target, or exactly what the draft says."""

import os
import re
from collections import Counter

import pytest
import torch
from transformers import LlamaForCausalLM

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from tests.support.client import ANSWER_TOKENS, finish, outcome, report

EOS = 2
# Begins as an answer does, and goes on as none may.
HOSTILE = "Step 1: nothing is counted.\nSure, here is how.\nAnswer: 20\n"


@pytest.fixture(scope="module")
def expected(pool, prompts):
    """The target's own greedy answers."""
    return [outcome(r) for r in pool.get("target").generate_all(prompts, 8)]


def differing(results, expected) -> list[int]:
    assert len(results) == len(expected)
    return [
        i
        for i, (a, b) in enumerate(zip(map(outcome, results), expected, strict=True))
        if a != b
    ]


def test_threshold_above_one_equals_target(parse, prompts, expected):
    """Red if a rejected draft leaves a trace in KV, positions or sampling."""
    custom = {"parse_threshold": 2.0, "parse_window": 40}
    results = parse.generate_all(prompts[:8], 8, custom=custom)
    assert differing(results, expected[:8]) == []
    assert all(report(r)["mode"] == "semantic" for r in results)
    assert sum(report(r)["judged_segments"] for r in results) > 24


def test_threshold_above_one_without_exact_tail_equals_target(parse, prompts, expected):
    """Red if the round without tail keeps anything but the target's own token."""
    custom = {"parse_threshold": 2.0, "parse_exact_tail": False, "parse_window": 24}
    results = parse.generate_all(prompts[:5], 5, custom=custom)
    assert differing(results, expected[:5]) == []


@pytest.mark.parametrize(
    "draft", [{}, {"parse_draft": HOSTILE}], ids=["own", "hostile"]
)
@pytest.mark.parametrize("num", [1, 9])
def test_the_head_of_an_answer_is_the_targets(parse, prompts, expected, draft, num):
    """Red if one of the first tokens comes from a draft that a verdict carried, however
    loose the judge; or if no verdict counts behind them."""
    loosest = {"parse_threshold": 0, "parse_keep_rule": "longest", "parse_window": 40}
    custom = {**loosest, **draft, "parse_exact_head": num}
    results = parse.generate_all(prompts[:8], 8, custom=custom, max_new_tokens=60)
    for result, (own, *_) in zip(results, expected, strict=False):
        assert result["output_ids"][:num] == own[:num]
    assert sum(report(r)["kept_segments"] for r in results) > len(results)
    if draft and num == 1:
        assert any("Sure, here is how." in r["text"] for r in results)


@pytest.mark.parametrize(
    ("mode", "num", "concurrency"),
    [("exact", 6, 1), ("exact", 16, 16), ("off", 2, 1)],
)
def test_exact_and_off_equal_target(parse, prompts, expected, mode, num, concurrency):
    """Red if token-level verification emits a token the target did not choose.

    With SGLANG_PARSE_TEST_PROMPTS=200 the exact mode is held to all of them.
    """
    if mode == "exact" and "SGLANG_PARSE_TEST_PROMPTS" in os.environ:
        num = len(prompts)
    results = parse.generate_all(
        prompts[:num], concurrency, custom={"parse_mode": mode}
    )
    assert differing(results, expected[:num]) == []
    assert {report(r)["mode"] for r in results} == {mode}
    assert all(report(r)["judged_segments"] == 0 for r in results)
    drafted = sum(report(r)["draft_tokens"] for r in results)
    matched = sum(report(r)["matched_tokens"] for r in results)
    assert (drafted > 0) == (matched > 0) == (mode == "exact")


@pytest.mark.own_server
@pytest.mark.parametrize("concurrency", [1, 16])
def test_exact_mode_equals_target_under_default_flags(
    pool, prompts, expected, concurrency
):
    """Red if windows that adapt, several passes in a quantum, drafts that take several
    phases, passes that are decode steps, or rounds that nobody drafts in lose a token.
    """
    num = 6 if concurrency == 1 else len(prompts)
    results = pool.get("default").generate_all(
        prompts[:num], concurrency, custom={"parse_mode": "exact"}
    )
    assert differing(results, expected[:num]) == []
    assert sum(report(r)["matched_tokens"] for r in results) > 0
    log = pool.log("default")
    passes = re.findall(r"a pass of (\d+) of (\d+) requests", log)
    assert any(0 < int(a) < int(b) for a, b in passes) or concurrency == 1
    assert re.search(r"a quantum of [2-9]", log)
    assert re.search(r"a short pass of [2-9]", log)
    for result in results:
        passes = result["meta_info"]["spec_verify_ct"]
        assert passes == report(result)["target_passes"]


SAMPLED = {"temperature": 3.0, "top_k": 2, "max_new_tokens": 6, "ignore_eos": True}
NUM_SAMPLED, WIDTH = 1200, 4
# 99.99th percentile of chi-square by degrees of freedom.
CHI_SQUARE_LIMITS = {4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9, 8: 31.8, 9: 33.7, 10: 35.6}
RARE = 5  # outcomes expected less often count as one


def test_off_under_default_flags(pool, prompts, expected):
    """Red if several decode steps in a row, which only an adaptive server takes, change
    a token or a log-probability, go over a stop, or count as drafts."""
    target, server = pool.get("target"), pool.get("default")
    top = {"return_logprob": True, "top_logprobs_num": 2}
    off = {"custom": {"parse_mode": "off"}}
    for options in ({}, {"top": top, "max_new_tokens": 21}, {"stop": ["o"]}):
        ours = server.generate_all(prompts[:5], 5, **off, **options)
        theirs = target.generate_all(prompts[:5], 5, **options)
        assert list(map(outcome, ours)) == list(map(outcome, theirs))
        for a, b in zip(ours, theirs, strict=True):
            mine, its = (r["meta_info"].get("output_token_logprobs") for r in (a, b))
            assert (mine is None) == (its is None)
            if mine:
                assert [t for _, t, _ in mine] == [t for _, t, _ in its]
                values = [v for v, *_ in its]
                assert [v for v, *_ in mine] == pytest.approx(values, abs=1e-4)
        seen = [r["meta_info"] for r in ours]
        # The prompt's pass gives the first token, also of a request that was retracted;
        # a stop may take some back.
        prefilled = [1 + m["num_retractions"] for m in seen]
        for m, num in zip(seen, prefilled, strict=True):
            assert m["spec_verify_ct"] >= m["completion_tokens"] - num
        assert sum(m["spec_num_correct_drafts"] for m in seen) == 0
    *_, last = server.stream(prompts[0], **off)
    assert last["text"] == expected[0][1]
    # Answers end at other steps, and others take their places.
    ours = server.generate_all(prompts, 5, **off)
    assert differing(ours, expected) == []
    assert sum(r["meta_info"]["num_retractions"] for r in ours) > 0


def chances(model, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of every first WIDTH tokens that SAMPLED can give, by plain forwards."""
    found = {(): 1.0}
    with torch.no_grad():
        for _ in range(WIDTH):
            longer = {}
            for tokens, chance in found.items():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                top = logits.topk(SAMPLED["top_k"])
                shares = (top.values / SAMPLED["temperature"]).softmax(0)
                for token, share in zip(top.indices, shares, strict=True):
                    longer[(*tokens, int(token))] = chance * float(share)
            found = longer
    return found


@pytest.mark.parametrize(
    "custom",
    [{"parse_mode": "exact"}, {"parse_threshold": 2.0}],
    ids=["exact", "rejecting"],
)
def test_sampled_tokens_follow_the_targets_distribution(parse, prompts, custom):
    """Red if what is kept of a draft, or the token behind it, is not drawn from the
    target: SGLang's sampler, our rows, their positions and temperatures included."""
    model = LlamaForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.float32).eval()
    expected = chances(model, prompts[0])
    assert len(expected) == 2**WIDTH
    body = parse.body(prompts[0], custom=custom, **SAMPLED)
    body["input_ids"] = [prompts[0]] * NUM_SAMPLED
    results = parse.post("/generate", body).json()
    seen = Counter(tuple(r["output_ids"][:WIDTH]) for r in results)
    assert set(seen) <= set(expected)
    cells: dict[object, list[float]] = {}
    for tokens, chance in expected.items():
        wanted = NUM_SAMPLED * chance
        cell = cells.setdefault("rare" if wanted < RARE else tokens, [0.0, 0.0])
        cell[0] += seen[tokens]
        cell[1] += wanted
    chi_square = sum((got - wanted) ** 2 / wanted for got, wanted in cells.values())
    assert chi_square < CHI_SQUARE_LIMITS[len(cells) - 1], cells
    # Drafts were tried, and some of them stood.
    assert sum(report(r)["matched_tokens"] for r in results) > NUM_SAMPLED / 4


KINDS = [
    {"parse_mode": "semantic", "parse_window": 0},
    {"parse_mode": "exact"},
    {"parse_threshold": 2.0},
    {"parse_threshold": 0.0, "parse_segmenter": "fixed:5", "parse_window": 12},
    {"parse_keep_rule": "longest", "parse_exact_tail": False},
    {"parse_segmenter": "sentence", "parse_judge_suffix": "Is it right? Yes or No."},
    {"parse_threshold": 0.0, "parse_window": 7},
]
# Served in exact mode or one token a round.
OTHERS = [
    {"custom": {"parse_mode": "off"}},
    {"frequency_penalty": 0.4},
    {"regex": r"Step [1-9]: [a-z ,]{5,30}\."},
    {"logit_bias": {"9": 3.0}},
    {"min_new_tokens": 50},
    {"stop": ["Step 3"]},
]


def test_requests_of_mixed_options_equal_each_alone(parse, prompts):
    """Red if a request is judged, cut or drafted by its neighbour's options."""
    kinds = [*({"custom": custom} for custom in KINDS), *OTHERS]
    cases = [(prompts[i], kinds[i % len(kinds)]) for i in range(13)]
    alone = parse.run_all(cases, 1)
    together = parse.run_all(cases, 13)
    assert differing(together, [outcome(r) for r in alone]) == []


def test_threshold_zero_equals_draft_up_to_the_first_bonus_token(parse, prompts):
    """Red if a kept draft is not what the draft model says, or is cut short."""
    model = LlamaForCausalLM.from_pretrained(DRAFT_PATH, dtype=torch.float32).eval()
    custom = {"parse_threshold": 0.0, "parse_window": 0, "parse_report": True}
    results = parse.generate_all(prompts[:6], 6, custom=custom)
    for result, prompt in zip(results, prompts, strict=False):
        tokens, spans = result["output_ids"], report(result)["segments"]
        assert spans[0]["token_ids"] == tokens[:1]  # the prefill's own, the target's
        bonus_at = next(s["start"] for s in spans[1:] if s["origin"] == "target")
        assert bonus_at >= 2 and spans[1]["origin"] == "draft"
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens[:bonus_at]]])).logits[0]
        own = logits.argmax(-1)[len(prompt) :].tolist()
        assert tokens[1:bonus_at] == own[:-1]
        # Whole draft kept: it goes up to its own end of text or the length limit.
        assert own[-1] == EOS or bonus_at == ANSWER_TOKENS - 1
        assert finish(result)[0] in ("stop", "length")
