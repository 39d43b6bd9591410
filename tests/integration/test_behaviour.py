"""SGLang behaviours users rely on, against a target-only server or its definition."""

import json
import time

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_parse.embedded.task import make_problems
from tests.support.client import (
    CHUNK,
    chat_ids,
    check_hidden_states,
    finish,
    outcome,
    report,
)

# Both must equal the target token for token: every draft rejected, and exact mode.
AS_TARGET = {
    "rejecting": {"parse_threshold": 2.0, "parse_window": 40},
    "exact": {"parse_mode": "exact"},
}
KEEP_ALL = {"parse_threshold": 0.0, "parse_window": 0}
# Tolerance of logprobs: the same sums over other shapes.
ATOL = 1e-4

SAMPLING = {
    "stop string at a line": {"stop": ["Step 3"]},
    "stop string inside a line": {"stop": ["so now", " makes"]},
    "stop that is listed later, comes first": {"stop": ["Step 4", "Answer", "Step 2"]},
    "stop string not trimmed": {"stop": ["Step 2"], "no_stop_trim": True},
    "stop string that never comes": {"stop": ["nowhere"]},
    "stop regex": {"stop_regex": "Step [34]"},
    "no new token": {"max_new_tokens": 0},
    "one new token": {"max_new_tokens": 1},
    "two new tokens": {"max_new_tokens": 2},
    "three new tokens": {"max_new_tokens": 3},
    "length inside a draft": {"max_new_tokens": 23},
    "ignore eos": {"ignore_eos": True, "max_new_tokens": 125},
    "min new tokens": {"min_new_tokens": 130, "max_new_tokens": 140},
    "frequency penalty": {"frequency_penalty": 0.4, "max_new_tokens": 60},
    "presence penalty": {"presence_penalty": 0.6, "max_new_tokens": 60},
    "repetition penalty": {"repetition_penalty": 1.2, "max_new_tokens": 60},
    "special tokens shown": {"skip_special_tokens": False},
    "regex": {"regex": r"Step [1-9]: [a-z ,]{5,30}\.", "max_new_tokens": 60},
    "json schema": {
        "json_schema": json.dumps(
            {
                "type": "object",
                "properties": {"answer": {"type": "integer", "maximum": 99}},
                "required": ["answer"],
            }
        ),
        "max_new_tokens": 60,
    },
    "ebnf": {
        "ebnf": 'root ::= "Step " [1-9] ": " [a-z ,]{5,30} "."',
        "max_new_tokens": 60,
    },
}


def test_sampling_options_equal_target(target, parse, prompts):
    """Red if an option is not honoured at a token that came from a draft, or at one of
    a neighbour without it: two requests with each option, beside those with the next
    ones."""
    cases = [(p, options) for options in SAMPLING.values() for p in prompts[:2]]
    names = [name for name in SAMPLING for _ in range(2)]
    expected = target.run_all(cases, 8)
    for mode, custom in AS_TARGET.items():
        ours = parse.run_all([(p, {**o, "custom": custom}) for p, o in cases], 8)
        pairs = zip(names, ours, expected, strict=True)
        differ = {name for name, a, b in pairs if outcome(a) != outcome(b)}
        assert not differ, mode


@pytest.mark.parametrize("custom", AS_TARGET.values(), ids=AS_TARGET.keys())
def test_draft_behind_the_end_of_a_grammar(target, parse, prompts, custom):
    """Red if its steps, which the grammar did not take, are taken back from it.

    SGLang ends such a request at the end token where it speculates, and one token later
    where it does not, so only texts are compared.
    """
    sampling = {"regex": "Step [1-9]: [a-z ]{3,9}", "ignore_eos": True}
    expected = target.generate_all(prompts[:3], 3, **sampling)
    results = parse.generate_all(prompts[:3], 3, custom=custom, **sampling)
    assert [r["text"] for r in results] == [r["text"] for r in expected]
    assert all(finish(r)[0] == "stop" for r in results)


def test_a_grammar_costs_no_passes(parse, prompts):
    """Red if drafts under a grammar are masked otherwise than the target: one that
    allows what the target writes anyway takes passes then, and keeps less."""
    custom, counts = (
        {"parse_mode": "exact"},
        ("spec_verify_ct", "spec_num_proposed_drafts"),
    )
    free, bound = (
        parse.generate_all(prompts[:3], 3, custom=custom, max_new_tokens=60, **grammar)
        for grammar in ({}, {"ebnf": r"root ::= [a-zA-Z0-9 :,.?+=*\n-]*"})
    )
    assert [outcome(r) for r in bound] == [outcome(r) for r in free]
    for name in counts:
        assert [r["meta_info"][name] for r in bound] == [
            r["meta_info"][name] for r in free
        ]


def test_judged_text_under_a_grammar_does_not_stop_the_server(parse, prompts):
    """Red if a text that is only judged is walked by a grammar."""
    custom = {"parse_verify": "Step 1: so\nAnswer: 7"}
    result = parse.generate(prompts[0], custom=custom, regex="[0-9]+", max_new_tokens=1)
    assert len(report(result)["segments"]) == 2


def test_custom_logit_processor_equals_target(target, parse, prompts):
    """Red if a processor is left out in rounds of ours."""
    plain = target.generate(prompts[0])["output_ids"]
    top = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    custom = {"token_ids": [plain[4], plain[11]]}
    expected = target.generate(prompts[0], top=top, custom=custom)
    assert expected["output_ids"] != plain
    result = parse.generate(prompts[0], top=top, custom=custom)
    assert outcome(result) == outcome(expected)
    assert report(result)["fallback"] == "custom_logit_processor"


def test_hidden_states_equal_target(target, parse, prompts):
    """Red if a state is another row's, or a judge suffix's."""
    top, sampling = {"return_hidden_states": True}, {"max_new_tokens": 30}
    target.flush()  # cached positions have no states
    parse.flush()
    expected = target.generate(prompts[7], top=top, **sampling)
    result = parse.generate(prompts[7], top=top, **sampling)
    check_hidden_states(result, expected, len(prompts[7]))


@pytest.mark.parametrize("custom", AS_TARGET.values(), ids=AS_TARGET.keys())
def test_logit_bias_equals_target(target, parse, prompts, custom):
    """Red if the bias applies to one of several sampled rows only."""
    plain = target.generate(prompts[0], max_new_tokens=30)["output_ids"]
    bias = {str(plain[3]): -20.0, str(plain[7]): 4.0}
    expected = target.generate(prompts[0], max_new_tokens=60, logit_bias=bias)
    result = parse.generate(
        prompts[0], max_new_tokens=60, logit_bias=bias, custom=custom
    )
    assert expected["output_ids"][:30] != plain
    assert outcome(result) == outcome(expected)
    if custom is AS_TARGET["rejecting"]:
        assert report(result)["fallback"] == "logit_bias"


@pytest.mark.parametrize("custom", AS_TARGET.values(), ids=AS_TARGET.keys())
def test_logprobs_equal_target(target, parse, prompts, custom):
    """Red if a logprob is read at another row than its token's."""
    top = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 6],
    }
    expected = target.generate_all(prompts[:3], 3, top=top)
    results = parse.generate_all(prompts[:3], 3, top=top, custom=custom)
    for result, other in zip(results, expected, strict=True):
        assert outcome(result) == outcome(other)
        ours, theirs = result["meta_info"], other["meta_info"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            assert [t for _, t, _ in ours[key]] == [t for _, t, _ in theirs[key]]
            values = [v for v, _, _ in theirs[key]]
            assert [v for v, _, _ in ours[key]] == pytest.approx(values, abs=ATOL)
        for key in ("output_top_logprobs", "output_token_ids_logprobs"):
            assert len(ours[key]) == len(theirs[key])
            for a, b in zip(ours[key], theirs[key], strict=True):
                assert [v for v, _, _ in a] == pytest.approx(
                    [v for v, _, _ in b], abs=ATOL
                )
    assert {report(r)["mode"] for r in results} == {"exact"}


def test_a_sampling_mask_is_refused(parse, prompts):
    """Red if `return_sampling_mask` ends in HTTP 500, or is left aside."""
    body = parse.body(prompts[0], top={"return_sampling_mask": True})
    reply = parse.post("/generate", body)
    assert reply.status_code == 400, reply.text[:300]
    assert "return_sampling_mask" in reply.text


def test_who_asks_for_more_beside_long_client_texts(target, parse, prompts):
    """Red if rows of others, of which many stand at once or were decided ahead, are
    looked for in what one request asked for: that stops the scheduler."""
    texts = [r["text"] for r in target.generate_all(prompts[:6], 6)]
    logprobs = {"return_logprob": True, "top_logprobs_num": 2}
    cases = []
    for i in range(6):
        name = ("parse_prediction", "parse_draft")[i % 2]
        top = (logprobs, {"return_hidden_states": True})[i // 2 % 2]
        cases.append((prompts[i], {"custom": {name: texts[i]}}))
        cases.append((prompts[10 + i], {"top": top, "max_new_tokens": 40}))
    parse.flush()
    alone = [outcome(r) for r in parse.run_all(cases, 1)]
    for _ in range(2):
        parse.flush()
        assert [outcome(r) for r in parse.run_all(cases, 12)] == alone


# -- Ends inside a kept draft -----------------------------------------------------


@pytest.fixture(scope="module")
def draft_answer(pool, prompts):
    """An answer that is almost wholly the draft's."""
    result = pool.get("parse").generate(prompts[1], custom=KEEP_ALL)
    assert report(result)["kept_tokens"] > 20
    return result


def test_stop_string_inside_a_kept_draft(parse, prompts, draft_answer):
    """Red if text past the stop is returned, or the stop is not seen in a draft."""
    whole = draft_answer["text"]
    for stop in ("Step 2", "get", "Answer"):
        result = parse.generate(prompts[1], custom=KEEP_ALL, stop=[stop])
        assert stop in whole
        assert result["text"] == whole[: whole.index(stop)]
        assert finish(result) == ("stop", stop)


def test_stop_token_inside_a_kept_draft(parse, prompts, draft_answer):
    """Red if the draft runs over a stop token of the request."""
    tokens = draft_answer["output_ids"]
    for token in (tokens[9], tokens[20]):
        result = parse.generate(prompts[1], custom=KEEP_ALL, stop_token_ids=[token])
        assert result["output_ids"] == tokens[: tokens.index(token) + 1]
        assert finish(result) == ("stop", token)


@pytest.mark.parametrize("length", [1, 2, 3, 10, 33])
def test_length_limit_inside_a_kept_draft(parse, prompts, draft_answer, length):
    """Red if a draft passes max_new_tokens or stops short of it."""
    result = parse.generate(prompts[1], custom=KEEP_ALL, max_new_tokens=length)
    assert len(result["output_ids"]) == length
    assert finish(result) == ("length", length)


def test_end_of_text_ends_a_kept_draft(draft_answer):
    """Red if an answer whose end the draft wrote does not end."""
    assert finish(draft_answer)[0] == "stop"
    assert draft_answer["text"].rstrip().splitlines()[-1].startswith("Answer")


# -- Context end, chunks, unicode ---------------------------------------------------


def long_prompt(tokenizer, num_tokens: int) -> list[int]:
    text = " ".join(p.prompt for p in make_problems(80, seed=9))
    ids = chat_ids(tokenizer, text)
    tail = ids[-8:]
    return ids[: num_tokens - len(tail)] + tail


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK + 1, 3 * CHUNK + 17])
def test_chunked_prefill_equals_target(target, parse, tokenizer, length):
    """Red if a chunk's KV, or the draft's catch-up over chunks, is wrong."""
    prompt = long_prompt(tokenizer, length)
    target.flush()
    parse.flush()
    expected = outcome(target.generate(prompt, max_new_tokens=24, ignore_eos=True))
    for custom in AS_TARGET.values():
        result = parse.generate(
            prompt, max_new_tokens=24, ignore_eos=True, custom=custom
        )
        assert outcome(result) == expected


@pytest.mark.parametrize(
    "custom", [*AS_TARGET.values(), KEEP_ALL], ids=[*AS_TARGET, "keeping"]
)
@pytest.mark.parametrize("room", [7, 21, 60])
def test_context_end(target, parse, tokenizer, room, custom):
    """Red if a draft or a suffix runs past the context, or the last token is lost."""
    prompt = long_prompt(tokenizer, 2048 - room)
    sampling = {"ignore_eos": True, "max_new_tokens": room}
    expected = target.generate(prompt, **sampling)
    result = parse.generate(prompt, custom=custom, **sampling)
    if custom is KEEP_ALL:
        assert len(result["output_ids"]) == len(expected["output_ids"])
        assert finish(result) == finish(expected)
    else:
        assert outcome(result) == outcome(expected)


def test_context_end_of_several_requests_at_once(target, parse, tokenizer):
    """Red if a row of the slot table overflows into the next request's (TRAP 3)."""
    cases = []
    customs = [*AS_TARGET.values(), *AS_TARGET.values()]
    for room, custom in zip((8, 30, 12, 45), customs, strict=True):
        options = {"ignore_eos": True, "max_new_tokens": room, "custom": custom}
        cases.append((long_prompt(tokenizer, 2048 - room), options))
    results = parse.run_all(cases, 4)
    expected = target.run_all([(p, o | {"custom": None}) for p, o in cases], 4)
    assert [outcome(r) for r in results] == [outcome(r) for r in expected]


@pytest.mark.parametrize(
    "text", ["Tom has 3 coins 🪙. Ещё 两 naïve?", "\u200b", "é" * 40]
)
def test_unicode_prompt_equals_target(target, parse, text):
    """Red if cut characters in a prompt or a draft break the segmenter."""
    sampling = {"max_new_tokens": 20, "ignore_eos": True}
    expected = outcome(target.generate(text, **sampling))
    for custom in AS_TARGET.values():
        assert outcome(parse.generate(text, custom=custom, **sampling)) == expected
    assert parse.generate(text, custom=KEEP_ALL, **sampling)["output_ids"]


# -- Streaming, n, abort --------------------------------------------------------------


@pytest.mark.parametrize(
    "custom", [None, KEEP_ALL, AS_TARGET["exact"]], ids=["default", "keeping", "exact"]
)
def test_stream_equals_whole_answer(parse, prompts, custom):
    """Red if a run of accepted tokens is streamed in part, twice or out of order."""
    whole = parse.generate(prompts[2], custom=custom)
    chunks = list(parse.stream(prompts[2], custom=custom))
    texts = [c["text"] for c in chunks]
    assert texts[-1] == whole["text"]
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert finish(chunks[-1]) == finish(whole)
    assert report(chunks[-1]).items() >= {"mode": report(whole)["mode"]}.items()


@pytest.mark.parametrize("custom", AS_TARGET.values(), ids=AS_TARGET.keys())
def test_continued_conversation_equals_target(
    target, parse, prompts, tokenizer, custom
):
    """Red if the cached prefix of a first turn, drafts and suffixes gone over it, is
    not the target's."""

    def second_turn(server, **options):
        first = server.generate(prompts[9], **options)
        more = tokenizer.encode("\nStep 1:", add_special_tokens=False)
        longer = [*prompts[9], *first["output_ids"], *more]
        return server.generate(longer, max_new_tokens=60, **options)

    expected, result = second_turn(target), second_turn(parse, custom=custom)
    assert result["meta_info"]["cached_tokens"] > len(prompts[9])
    assert outcome(result) == outcome(expected)


def test_several_samples_of_one_prompt(target, parse, prompts):
    """Red if copies of a request share worker state."""
    expected = target.generate(prompts[3], n=2)
    for custom in AS_TARGET.values():
        results = parse.generate(prompts[3], n=2, custom=custom)
        assert [outcome(r) for r in results] == [outcome(r) for r in expected]
    assert len(parse.generate(prompts[3], n=3, temperature=0.8)) == 3


@pytest.mark.parametrize(
    "custom", [None, KEEP_ALL, {"parse_mode": "off"}], ids=["default", "keeping", "off"]
)
def test_abort_in_mid_generation(parse, prompts, custom):
    """Red if an aborted request leaks slots (SGLang's idle check) or state."""
    rid = f"abort-{time.time()}"
    body = parse.body(prompts[5], custom=custom, ignore_eos=True, max_new_tokens=1500)
    stream = parse.stream_body(body | {"rid": rid})
    assert next(stream)["meta_info"]["finish_reason"] is None
    assert parse.post("/abort_request", {"rid": rid}).status_code == 200
    *_, last = stream
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    parse.flush()  # refused if a request were still running


def test_client_that_hangs_up(parse, prompts):
    """Red if a closed stream leaves its request running for ever."""
    stream = parse.stream(prompts[6], ignore_eos=True, max_new_tokens=1500)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 60
    while parse.post("/flush_cache").status_code != 200:
        assert time.monotonic() < deadline, "the request is still running"
        time.sleep(0.5)
