"""A real model in exact mode says what its target says alone.

Sums in another order may turn a near-tie of two logits. A difference is an error unless
the target alone gives both tokens within NEAR of each other there.
"""

import json
import os
import re

import pytest

from tests.integration.test_agents import ASKED, NESTED, TOOLS, answered, call
from tests.real.conftest import NUM_ALONE, NUM_OTHER, OTHER_CONTEXT
from tests.support.client import finish, outcome, report

TOKENS = 10
NEAR = 1e-3  # nats between the two likeliest tokens; float32, 30 layers
# By the draft model, also on a server with an EAGLE-3 head.
EXACT = {"parse_mode": "exact", "parse_compose": False}
BY_HEAD = {"parse_mode": "exact"}


@pytest.fixture(scope="module")
def expected(target, prompts):
    """The target's own greedy answers."""
    read_once(target, prompts)
    return target.generate_all(prompts, 16, max_new_tokens=TOKENS)


def read_once(server, prompts):
    """Leave what long prompts begin with in the server's cache. Side by side each of
    them would be prefilled."""
    server.generate(max(prompts[:8], key=len), max_new_tokens=1)


def split_at(ours: list[int], theirs: list[int]) -> int | None:
    """Where two answers part, None if they do not."""
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    same = [a == b for a, b in pairs]
    return same.index(False) if False in same else len(same)


def is_near_tie(target, prompt, ours: list[int], theirs: list[int], at: int) -> bool:
    """Whether the target finds the two tokens at `at` about equally likely."""
    if at >= min(len(ours), len(theirs)):
        return False
    result = target.generate(
        [*prompt, *theirs[:at]],
        max_new_tokens=1,
        top={"return_logprob": True, "top_logprobs_num": 2},
    )
    top = result["meta_info"]["output_top_logprobs"][0]
    gap = top[0][0] - top[1][0]
    return {t for _, t, *_ in top} == {ours[at], theirs[at]} and gap < NEAR


def errors(target, prompts, results, expected) -> list[int]:
    """Prompts whose answers differ by more than a near-tie."""
    found = []
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        at = split_at(a["output_ids"], b["output_ids"])
        if at is None:
            if outcome(a) != outcome(b):
                found.append(i)
        elif not is_near_tie(target, prompts[i], a["output_ids"], b["output_ids"], at):
            found.append(i)
    return found


@pytest.mark.parametrize("concurrency", [16, 1])
def test_exact_mode_equals_target(parse, target, prompts, expected, concurrency):
    """Red if a large vocabulary, real prose or a long prompt costs a token."""
    num = NUM_ALONE if concurrency == 1 else len(prompts)
    asked, wanted = prompts[:num], expected[:num]
    read_once(parse, prompts)
    results = parse.generate_all(
        asked, concurrency, custom=EXACT, max_new_tokens=TOKENS
    )
    assert errors(target, asked, results, wanted) == []
    assert {report(r)["mode"] for r in results} == {"exact"}
    assert sum(report(r)["draft_tokens"] for r in results) > 0


@pytest.mark.skipif(
    "SGLANG_PARSE_TEST_SCALE" not in os.environ,
    reason="SGLANG_PARSE_TEST_SCALE=1 starts a third server of the real model",
)
@pytest.mark.parametrize("concurrency", [16, 1])
def test_any_draft_leaves_the_targets_answers(
    drafters, target, prompts, expected, concurrency
):
    """Red if a token that was copied, streamed by another server, or brought over from
    another tokenizer stands where the target says something else."""
    room = OTHER_CONTEXT - TOKENS - 1
    some = [i for i, p in enumerate(prompts[:NUM_OTHER]) if len(p) < room]
    asked, wanted = [prompts[i] for i in some], [expected[i] for i in some]
    results = drafters.generate_all(
        asked, concurrency, custom={"parse_mode": "exact"}, max_new_tokens=TOKENS
    )
    assert errors(target, asked, results, wanted) == []
    for name in ("ngram", "remote", "model"):
        assert any(report(r)["drafted_by"].get(name) for r in results), name


def test_eagle3_equals_target(parse, target, prompts, expected):
    """Red if what the head drafts is kept where the target says something else."""
    results = parse.generate_all(prompts[:16], 8, custom=BY_HEAD, max_new_tokens=TOKENS)
    assert errors(target, prompts[:16], results, expected[:16]) == []
    assert sum(report(r)["eagle_draft_tokens"] for r in results) > 0


def test_streamed_pieces_join_to_the_answer(parse, prompts, expected):
    """Red if a character of several tokens is shown in halves, or a piece is lost."""
    for i in [i for i in range(len(prompts)) if i % 8 == 5][:4]:
        chunks = list(parse.stream(prompts[i], custom=EXACT, max_new_tokens=TOKENS))
        texts = [c["text"] for c in chunks]
        assert texts[-1] == expected[i]["text"]
        for shorter, longer in zip(texts, texts[1:], strict=False):
            assert longer.startswith(shorter)


def border_strings(tokenizer, result) -> list[str]:
    """Strings that begin inside one token of an answer and end inside the next."""
    found = []
    pieces = [tokenizer.decode([t]) for t in result["output_ids"]]
    for a, b in zip(pieces[3:], pieces[4:], strict=False):
        if len(a) > 2 and len(b) > 2 and "\ufffd" not in a + b:
            found.append(a[-2:] + b[:2])
    return found[:1]


def test_stop_strings_across_tokens(parse, target, prompts, expected, tokenizer):
    """Red if a stop string is missed that no single token holds."""
    cases = [
        (prompts[i], {"stop": [s], "max_new_tokens": TOKENS})
        for i in range(0, 16)
        for s in border_strings(tokenizer, expected[i])
    ]
    assert len(cases) > 4
    ours = parse.run_all([(p, o | {"custom": EXACT}) for p, o in cases], 4)
    theirs = target.run_all(cases, 4)
    assert [outcome(r) for r in ours] == [outcome(r) for r in theirs]
    assert sum(finish(r)[0] == "stop" for r in ours) >= len(cases) - 1


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
GRAMMARS = {
    "schema": ({"json_schema": json.dumps(PERSON)}, None),
    "regex": ({"regex": r"[A-Z][a-z]{2,8}, [0-9]{4}\."}, r"[A-Z][a-z]{2,8}, \d{4}\."),
    "ebnf": (
        {"ebnf": 'root ::= "Yes, " word " " word "."\nword ::= [a-z] [a-z]+'},
        r"Yes, [a-z]+ [a-z]+\.",
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_equal_target(parse, target, prompts, name):
    """Red if a mask over 49,152 tokens lets a draft's token through."""
    grammar, pattern = GRAMMARS[name]
    options = grammar | {"max_new_tokens": 40}
    some = prompts[:3]
    ours = parse.generate_all(some, 3, custom=EXACT, **options)
    theirs = target.generate_all(some, 3, **options)
    assert errors_under(target, ours, theirs) == []
    for result in ours:
        if finish(result)[0] != "stop":
            continue
        if pattern is None:
            assert set(json.loads(result["text"])) == {"name", "age"}
        else:
            assert re.fullmatch(pattern, result["text"])


def errors_under(target, ours, theirs) -> list[int]:
    """Under a grammar a near-tie cannot be asked for: all must be the same."""
    pairs = zip(ours, theirs, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if outcome(a) != outcome(b)]


def test_tool_calls_arrive_as_from_the_target_alone(target, parse):
    """Red if a call, its arguments, prose before it or a count differ from the stock
    server's, where a step has several tokens of them. A grammar gives the words."""
    calls = call("get_weather", NESTED) + "\n" + call("get_time")
    answer = "Let me look.\n" + calls
    body = {"tools": TOOLS, "regex": re.escape(answer), "messages": ASKED}
    body |= {"max_tokens": 300}
    found, usage = answered(parse, True, **body)
    expected, counts = answered(target, True, **body)
    assert found == expected
    _, text, calls = found
    assert text == "Let me look." and len(calls) == 2
    assert usage["completion_tokens"] == counts["completion_tokens"]
