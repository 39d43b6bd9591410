"""Drafts with a tokenizer of their own, on real servers."""

from __future__ import annotations

import json
import os

import pytest

from sglang_parse.embedded.task import check_answer, make_problems
from tests.support.client import ANSWER_TOKENS

#: Requests of a comparison with the target alone; all prompts where a number is set.
NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "16"))


def ids_of(results) -> list[list[int]]:
    return [one["output_ids"] for one in results]


def report_of(result) -> dict:
    return result["meta_info"]["parse"][-1]


def chat(server, problem, custom):
    """The answer to a problem at the chat endpoint, and its report."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": problem.prompt}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "return_meta_info": True,
        "custom_params": custom,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text[:500]
    (choice,) = reply.json()["choices"]
    return choice["message"]["content"], choice["meta_info"]["parse"][-1]


@pytest.mark.parametrize("mode", ["semantic", "exact"])
def test_the_same_weights_behind_other_ids_draft_the_same(pool, mode):
    """Red if anything is lost between the two token spaces or the two chat templates:
    the drafts, the verdicts and the answers are those of the draft that has the
    target's ids and markers."""
    custom = {"parse_mode": mode, "parse_report": True}
    found = []
    for name in ("parse", "permuted"):
        server = pool.get(name)
        found.append([chat(server, p, custom) for p in make_problems(10, seed=2024)])
    ours, theirs = found
    assert [text for text, _ in ours] == [text for text, _ in theirs]
    keys = ("target_passes", "draft_tokens", "segments")
    told = [[[r.get(k) for k in keys] for _, r in one] for one in found]
    # A draft of text hands a word over when the next one has begun, so a window may
    # hold one token less.
    same = sum(a == b for a, b in zip(*told, strict=True))
    assert same >= 0.9 * len(ours)


def test_exact_mode_writes_what_the_target_alone_writes(pool, target, prompts):
    """Red if a draft in text changes an answer."""
    some = prompts[:NUM]
    expected = ids_of(target.generate_all(some, 8))
    server = pool.get("other")
    for compose, concurrency in ((False, 1), (False, 16), (True, 16)):
        custom = {"parse_mode": "exact", "parse_compose": compose}
        assert ids_of(server.generate_all(some, concurrency, custom=custom)) == expected


def test_a_draft_in_text_is_judged(pool):
    """Red if such drafts are not kept: a server that drafts nothing answers right
    too."""
    from transformers import AutoTokenizer

    from sglang_parse.embedded import TARGET_PATH
    from tests.support.client import chat_ids

    problems = make_problems(24, seed=77)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    prompts = [chat_ids(tokenizer, p.prompt) for p in problems]
    custom = {"parse_mode": "semantic", "parse_compose": False}
    results = pool.get("other").generate_all(prompts, 4, custom=custom)
    right = [
        check_answer(p, one["text"]) for p, one in zip(problems, results, strict=True)
    ]
    assert sum(right) >= 24 - 2
    passes = sum(report_of(one)["target_passes"] for one in results)
    tokens = sum(one["meta_info"]["completion_tokens"] for one in results)
    assert tokens > 8 * passes


def test_what_a_draft_cannot_know_is_followed_all_the_same(pool, target, prompts):
    """Red if a grammar, text that is no task of the draft, broken characters or a
    sampled answer ends in an error."""
    server = pool.get("other")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    strange = ["🏳️‍🌈 é 好的\u200d", "<|im_start|>user\n\x00", " " * 50]
    cases = [(p, {}) for p in strange]
    cases += [(prompts[0], {"json_schema": json.dumps(schema)})]
    cases += [(prompts[1], {"custom": {"parse_mode": "exact"}, "ignore_eos": True})]
    for prompt, options in cases:
        custom = {"parse_mode": "exact"} | options.pop("custom", {})
        ours = server.generate(prompt, custom=custom, max_new_tokens=60, **options)
        alone = target.generate(prompt, max_new_tokens=60, **options)
        assert ours["output_ids"] == alone["output_ids"], prompt
    sampled = server.generate(prompts[2], temperature=1.0, top_p=0.9)
    assert sampled["text"]
    assert server.is_alive()
