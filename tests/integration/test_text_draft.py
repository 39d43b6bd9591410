"""Drafts with a tokenizer of their own, on real servers."""

from __future__ import annotations

import json
import os
import re

import pytest

from sglang_parse.embedded.task import check_answer, make_problems
from tests.support.client import chat_choice, report, session

#: Requests of a comparison with the target alone; all prompts where a number is set.
NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "8"))
SCALE = "SGLANG_PARSE_TEST_SCALE"


def ids_of(results) -> list[list[int]]:
    return [one["output_ids"] for one in results]


@pytest.mark.parametrize("mode", ["semantic", "exact"])
def test_the_same_weights_behind_other_ids_draft_the_same(pool, mode):
    """Red if anything is lost between the two token spaces or the two chat templates:
    the drafts, the verdicts and the answers are those of the draft that has the
    target's ids and markers."""
    custom = {"parse_mode": mode, "parse_report": True}
    found = []
    for name in ("parse", "permuted"):
        server = pool.get(name)
        problems = make_problems(6, seed=2024)
        found.append([chat_choice(server, p.prompt, custom) for p in problems])
    ours, theirs = ([one["message"] for one in answers] for answers in found)
    assert ours == theirs
    keys = ("target_passes", "draft_tokens", "segments")
    told = [[[report(one).get(k) for k in keys] for one in each] for each in found]
    # A draft of text hands a word over when the next one has begun, so a window may
    # hold one token less.
    same = sum(a == b for a, b in zip(*told, strict=True))
    assert same >= len(ours) - 1


@pytest.mark.combines("draft in text", "head")
def test_exact_mode_writes_what_the_target_alone_writes(pool, target, prompts):
    """Red if a draft in text changes an answer, alone, with an EAGLE-3 head in front,
    or where requests are retracted and drafted for anew."""
    some = prompts[:NUM]
    expected = ids_of(target.generate_all(some, 8))
    server = pool.get("other")
    for compose, concurrency in ((False, 1), (False, 16), (True, 16)):
        # Most of a longer window would be cut off.
        custom = {"parse_mode": "exact", "parse_compose": compose, "parse_window": 24}
        num = len(some) if concurrency > 1 or SCALE in os.environ else 4
        results = server.generate_all(some[:num], concurrency, custom=custom)
        assert ids_of(results) == expected[:num]
        drafted = set().union(*(report(r)["drafted_by"] for r in results))
        assert drafted >= ({"eagle3"} if compose else {"model"})
        if concurrency > 1:
            assert sum(r["meta_info"]["num_retractions"] for r in results) > 0


def test_a_draft_in_text_is_judged(pool):
    """Red if such drafts are not kept: a server that drafts nothing answers right
    too."""
    from transformers import AutoTokenizer

    from sglang_parse.embedded import TARGET_PATH
    from tests.support.client import chat_ids

    problems = make_problems(16, seed=77)
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    prompts = [chat_ids(tokenizer, p.prompt) for p in problems]
    custom = {"parse_mode": "semantic", "parse_compose": False}
    results = pool.get("other").generate_all(prompts, 4, custom=custom)
    right = [
        check_answer(p, one["text"]) for p, one in zip(problems, results, strict=True)
    ]
    assert sum(right) >= 16 - 2
    passes = sum(report(one)["target_passes"] for one in results)
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
    assert server.is_alive()


def test_sampled_answers_are_the_samplers(pool, target, prompts):
    """Red if a sampled request gets the greedy draft, or the draft's own tokens: with
    one token to draw from, the answer is the target's; with all of them, it varies."""
    server, some = pool.get("other"), prompts[:4]
    custom = {"parse_mode": "exact", "parse_compose": False}
    one = {"temperature": 1.0, "top_p": 1e-6}
    ours = server.generate_all(some, 4, custom=custom, **one)
    assert ids_of(ours) == ids_of(target.generate_all(some, 4))
    # Four short answers to one prompt are the same once in some twenty turns.
    hot = {"temperature": 1.5, "max_new_tokens": 64}
    drawn = ids_of(server.generate_all([p for p in some for _ in range(4)], 4, **hot))
    assert len({tuple(ids) for ids in drawn}) > 2 * len(some)


def two_turns(server, tokenizer, prompt):
    """The answers of a session of two turns."""
    end = "<|im_end|>\n<|im_start|>assistant\n"
    more = f"<|im_end|>\n<|im_start|>user\n{make_problems(1, seed=9)[0].prompt}{end}"
    turns = (prompt, tokenizer.encode(more, add_special_tokens=False))
    custom = {"parse_mode": "exact", "parse_compose": False}
    return session(server, turns, custom=custom)


@pytest.mark.combines("draft in text", "radix cache")
def test_a_session_goes_on_with_a_draft_in_text(pool, target, tokenizer, prompts):
    """Red if the second turn of a session is drafted behind another text than its
    first, so that its answer changes, or is not drafted at all."""
    ours, theirs = (
        two_turns(server, tokenizer, prompts[0])
        for server in (pool.get("other"), target)
    )
    assert ids_of(ours) == ids_of(theirs)
    assert all(report(one)["drafted_by"].get("model") for one in ours)


def test_pieces_of_a_stream_join_to_the_answer(pool, prompts):
    """Red if text that a draft in text brought is streamed twice, or left out."""
    server, custom = pool.get("other"), {"parse_mode": "exact", "parse_compose": False}
    whole = server.generate(prompts[3], custom=custom)
    texts = [c["text"] for c in server.stream(prompts[3], custom=custom)]
    assert len(texts) > 1 and texts[-1] == whole["text"]
    for shorter, longer in zip(texts, texts[1:], strict=False):
        assert longer.startswith(shorter)


@pytest.mark.combines("draft in text", "grammar")
def test_a_judged_draft_keeps_to_a_grammar(pool, prompts):
    """Red if judged text that breaks a request's grammar becomes part of an answer."""
    custom = {"parse_mode": "semantic", "parse_threshold": 0.0}
    pattern = r"Step 1: [A-Za-z ]{4,20}[0-9]{1,3}\."
    results = pool.get("other").generate_all(
        prompts[:4], 4, custom=custom, regex=pattern
    )
    for one in results:
        assert re.fullmatch(pattern, one["text"]), one["text"]
    assert any(report(one)["drafted_by"].get("model") for one in results)


@pytest.mark.combines("draft in text", "tensor parallelism", "head")
@pytest.mark.skipif(not os.environ.get(SCALE), reason=f"two more ranks; set {SCALE}=1")
def test_two_ranks_have_the_same_draft_in_text(pool, target, tokenizer, prompts):
    """Red if two ranks encode, draft or keep different texts: tokens differ, or each
    waits for the other for ever."""
    some = prompts[:NUM]
    expected = ids_of(target.generate_all(some, 8))
    ranks = pool.get("other-ranks")
    for compose in (False, True):
        custom = {"parse_mode": "exact", "parse_compose": compose}
        assert ids_of(ranks.generate_all(some, 8, custom=custom)) == expected
    judged = ranks.generate_all(some, 4, custom={"parse_compose": False})
    assert sum(report(one)["kept_by"].get("model", 0) for one in judged) > len(some)
    hot = {"temperature": 1.0, "max_new_tokens": 40}
    assert all(one["text"] for one in ranks.generate_all(some, 4, **hot))
    ours, theirs = (two_turns(one, tokenizer, prompts[0]) for one in (ranks, target))
    assert ids_of(ours) == ids_of(theirs)
    assert all(report(one)["drafted_by"].get("model") for one in ours)
    assert ranks.is_alive()
