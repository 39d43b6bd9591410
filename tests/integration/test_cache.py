"""The radix cache holds nothing but true target KV.

Tolerance 1e-4 on logprobs: a cached prefix changes the shape of the sums, no more.
"""

import pytest

from tests.support.client import outcome, report

LOGPROB_TOLERANCE = 1e-4
PROBE = {
    "max_new_tokens": 6,
    "ignore_eos": True,
    "top": {"return_logprob": True, "top_logprobs_num": 4},
}
KINDS = [
    {"parse_window": 0},
    {"parse_threshold": 0.0},
    {"parse_threshold": 0.0, "parse_segmenter": "fixed:6", "parse_window": 20},
    {"parse_threshold": 2.0},
    {"parse_keep_rule": "longest", "parse_exact_tail": False},
    {"parse_mode": "exact"},
]


def logprobs(result) -> list[list[float]]:
    rows = result["meta_info"]["output_top_logprobs"]
    return [[value for value, _, _ in row] for row in rows]


def check_same_on_fresh_cache(server, probes) -> None:
    """Each probe gives the same with what is cached now and with an empty cache."""
    cached = [server.generate(p, **PROBE) for p in probes]
    fresh = []
    for probe in probes:
        server.flush()
        fresh.append(server.generate(probe, **PROBE))
    for a, b in zip(cached, fresh, strict=True):
        assert b["meta_info"]["cached_tokens"] == 0
        assert a["meta_info"]["cached_tokens"] > 0
        assert a["output_ids"] == b["output_ids"]
        for x, y in zip(logprobs(a), logprobs(b), strict=True):
            assert x == pytest.approx(y, abs=LOGPROB_TOLERANCE)


def run_batch(parse, prompts) -> list[dict]:
    parse.flush()
    cases = [
        (p, {"custom": kind | {"parse_report": True}})
        for p, kind in zip(prompts, KINDS, strict=False)
    ]
    return parse.run_all(cases, len(KINDS))


def test_prefix_ending_inside_a_former_draft(parse, prompts):
    """Red if kept tokens keep the draft's KV, or KV that a suffix has overwritten."""
    results = run_batch(parse, prompts)
    probes = []
    for prompt, result in zip(prompts, results, strict=False):
        tokens = result["output_ids"]
        probes.append(prompt + tokens[: len(tokens) // 2])
        assert len(tokens) > 10
    check_same_on_fresh_cache(parse, probes)


def test_prefix_is_taken_from_the_cache_deep_into_the_output(parse, prompts):
    """Red if outputs are not cached at all, which would make the tests here idle."""
    (result,) = run_batch(parse, prompts)[:1]
    tokens = result["output_ids"]
    again = parse.generate(prompts[0] + tokens, max_new_tokens=1)
    cached = again["meta_info"]["cached_tokens"]
    assert cached >= len(prompts[0]) + len(tokens) - 2


def test_whole_output_and_rejected_draft_as_prefix(parse, prompts):
    """Red if a rejected segment or a suffix is found under the accepted tokens."""
    results = run_batch(parse, prompts)
    probes = []
    for prompt, result in zip(prompts, results, strict=False):
        tokens = result["output_ids"]
        rejected = [
            s for s in report(result).get("segments", ()) if s["outcome"] == "rejected"
        ]
        if rejected:
            span = rejected[0]
            probes.append(prompt + tokens[: span["start"]] + span["token_ids"])
        else:
            probes.append(prompt + tokens)
    check_same_on_fresh_cache(parse, probes)


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_answer_on_a_warm_cache_equals_a_cold_one(parse, prompts, kind):
    """Red if the draft drafts from KV it does not have: flags lie after a radix hit."""
    prompt = prompts[7]
    parse.flush()
    cold = parse.generate(prompt, custom=kind)
    warm = parse.generate(prompt, custom=kind)
    assert warm["meta_info"]["cached_tokens"] > 0
    assert outcome(warm) == outcome(cold)
    # A prefix that only the target has forwarded: the draft must catch up on it.
    parse.flush()
    parse.generate(prompt, custom={"parse_mode": "off"})
    half_warm = parse.generate(prompt, custom=kind)
    assert half_warm["meta_info"]["cached_tokens"] > 0
    assert outcome(half_warm) == outcome(cold)
