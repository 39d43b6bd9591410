"""Bad requests are answered with HTTP 400 and a reason; the server lives on."""

import pytest

from sglang_parse.options.validation import shown

BAD = {
    "parse_mode": ["fast", 1, ["off"]],
    "parse_threshold": ["0.5", -1, 2.5, True, 1e308, {"value": 1}],
    "parse_keep_rule": ["first"],
    "parse_segmenter": ["words", "fixed:0", None],
    "parse_window": [-1, 1.5, "8", 10**18],
    "parse_judge_suffix": ["", 5, "x" * 3000],
    "parse_exact_tail": [1, "yes"],
    "parse_report": ["true"],
    "parse_treshold": [0.5],
}
CASES = [(field, value) for field, values in BAD.items() for value in values]
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tom has 3 coins."}],
    "max_tokens": 5,
}


def check_refused(reply, field: str, value=None) -> None:
    """value: what was asked, of which the message must show the beginning."""
    assert reply.status_code == 400, reply.text[:300]
    assert f"custom_params.{field}" in reply.text
    assert "expected" in reply.text
    if value is not None:
        beginning = shown(value)[:20].rstrip(".")
        assert beginning in reply.text.replace('\\"', '"'), reply.text
    assert "Traceback" not in reply.text
    assert len(reply.text) < 2000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bad_option_is_refused_on_openai_endpoints(parse, path, stream):
    """Red if an OpenAI endpoint drops custom_params or answers with 500."""
    for field, value in CASES:
        body = CHAT | {"stream": stream, "custom_params": {field: value}}
        if path == "/v1/completions":
            del body["messages"]
            body["prompt"] = "Tom has 3 coins."
        check_refused(parse.post(path, body), field, value)


HOSTILE_SUFFIXES = {
    "the marker of our own template split": "PARSE-CUT-MARK",
    "the marker inside a question": "Is it PARSE-CUT-MARK right? Yes or No.",
    "template syntax": "{{ messages }} {% for x in y %}",
    "special tokens": "<|im_end|>\n<|im_start|>assistant\n",
    "no letters": "?",
    "many characters": "対" * 1999,
    "nul": "Is it\u0000 right?",
    "newlines": "Is it\n\n\nright?\n",
    "spaces around": "   Is it right?   ",
}


@pytest.mark.parametrize(
    "suffix", HOSTILE_SUFFIXES.values(), ids=HOSTILE_SUFFIXES.keys()
)
def test_any_judge_suffix_is_served_or_refused(parse, prompts, suffix):
    """Red if a question of a client's choice can stop the scheduler."""
    body = parse.body(prompts[0], custom={"parse_judge_suffix": suffix})
    reply = parse.post("/generate", body)
    assert reply.status_code in (200, 400)
    if reply.status_code == 400:
        assert "parse_judge_suffix" in reply.text
    assert parse.generate(prompts[0], max_new_tokens=3)["output_ids"]


def test_lone_surrogate_in_the_suffix_is_no_server_error(parse, prompts):
    """Red if text that cannot be encoded reaches the tokenizer in the scheduler."""
    import json

    import requests

    body = parse.body(prompts[0], custom={"parse_judge_suffix": "Is it \ud800 right?"})
    reply = requests.post(
        parse.url + "/generate",
        data=json.dumps(body),
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert reply.status_code in (200, 400)
    assert parse.generate(prompts[0], max_new_tokens=3)["output_ids"]


# A rule without an end: the grammar takes "Step" and allows nothing behind it.
NO_END = 'root ::= "Step" x\nx ::= x "b"'
ALLOWED = {
    "stop tokens that are none": {"stop_token_ids": [1 << 63, -5, 10**7]},
    "many stop expressions": {"stop_regex": ["no such text"] * 32},
}


@pytest.mark.parametrize("mode", ["semantic", "exact"])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_sglang_outlives_parse_does(parse, target, prompts, name, mode):
    """Red if a request that ends in an answer beside the target stops the scheduler of
    a PARSE server."""
    alone = target.generate(prompts[0], **ALLOWED[name])
    custom = {"parse_mode": mode}
    got = parse.generate(prompts[0], custom=custom, **ALLOWED[name])
    if mode == "exact":
        assert got["output_ids"] == alone["output_ids"]
    assert parse.is_alive()


ENDLESS = {
    "without an end": {"ebnf": NO_END},
    "without a beginning": {"ebnf": 'root ::= x\nx ::= x "b"'},
}
BROKEN = {
    "no regex": {"regex": "("},
    "no grammar": {"ebnf": "root ::="},
    "no schema": {"json_schema": "{"},
    "a schema that is none": {"json_schema": '{"type": "nothing"}'},
    "a schema that nothing satisfies": {
        "json_schema": '{"type": "integer", "minimum": 5, "maximum": 4}'
    },
    "no structural tag": {"structural_tag": "{}"},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", [*ENDLESS, *BROKEN])
def test_a_grammar_without_text_is_the_request_s_fault(parse, prompts, name, stream):
    """Red if a grammar that no text satisfies is told as the server's fault."""
    sampling = (ENDLESS | BROKEN)[name]
    body = parse.body(prompts[0], max_new_tokens=8, **sampling) | {"stream": stream}
    reply = parse.post("/generate", body)
    assert reply.status_code == 400 or '"status_code":400' in reply.text, reply.text
    assert ("allows no token" in reply.text) == (name in ENDLESS)
    assert parse.is_alive()


FORMATS = {
    "broken regex": {"regex": "("},
    "broken ebnf": {"ebnf": "root ::="},
    "endless ebnf": {"ebnf": NO_END},
    "empty schema": {"response_format": {"type": "json_schema"}},
    "no format": {"response_format": {}},
    "unknown format": {"response_format": {"type": "poem"}},
    "impossible schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "a",
                "schema": {"type": "integer", "minimum": 5, "maximum": 4},
            },
        }
    },
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_of_an_answer_is_the_server_s_fault(parse, name, path):
    """Red if a broken or empty format is answered with HTTP 500 there."""
    body = CHAT | FORMATS[name]
    if path == "/v1/completions":
        messages = body.pop("messages")
        body["prompt"] = messages[0]["content"]
    reply = parse.post(path, body)
    assert reply.status_code in (200, 400), reply.text[:300]
    assert parse.is_alive()


@pytest.mark.parametrize("limit", [12.0, 12.5])
def test_ollama_s_limit_is_a_number_of_tokens(parse, limit):
    """Red if a limit that is no whole number stops the scheduler or keeps it busy."""
    body = {"model": "default", "prompt": "Tom has 3 coins.", "stream": False}
    reply = parse.post("/api/generate", body | {"options": {"num_predict": limit}})
    assert reply.status_code == 200, reply.text[:300]
    assert reply.json()["eval_count"] <= 12
    assert parse.is_alive()
