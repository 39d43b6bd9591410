"""What agents rely on: counts, sessions and streamed calls, beside a stock server.

`parse_draft` with threshold 0 makes any text the answer, in one scheduler step.
"""

import itertools
import json
import re
import time

import pytest
import requests

from sglang_parse.embedded.task import make_problems
from tests.support.client import Server, chat_ids, outcome, session

pytestmark = pytest.mark.own_server

WHOLE_DRAFT = {"parse_threshold": 0, "parse_window": 0}
STOPS = {
    "string": {"stop": ["Step 2"]},
    "second of the list": {"stop": ["Step 3", "tep 2:"]},
    "expression": {"stop_regex": [r"Step [2-9]"]},
    "end of an expression": {"stop_regex": ["Step 2$"]},
    "length": {"max_new_tokens": 19},
    "token": {"stop_token_ids": [9]},
    "none": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "when": {"type": "object"}},
            },
        },
    }
    for name in ("get_weather", "get_time")
]
END = "\n@@"


def call(name: str, arguments: str = '{"city": "Rome"}') -> str:
    body = '{"name": "%s", "arguments": %s}' % (name, arguments)  # noqa: UP031
    return f"<tool_call>\n{body}\n</tool_call>"


NESTED = '{"city": "Zürich", "when": {"day": [1, {"h": "a} b"}]}}'
THOUGHT = "<think>\nhm\n</think>\n\n"
ANSWERS = {
    "prose": THOUGHT + "It is warm in Rome.",
    "one call": THOUGHT + call("get_weather"),
    "prose and a call": THOUGHT + "Let me look.\n" + call("get_weather"),
    "two calls": THOUGHT + call("get_weather") + "\n" + call("get_time"),
    "three calls": THOUGHT
    + "\n".join([call("get_weather"), call("get_time"), call("get_weather", NESTED)]),
    "nested": THOUGHT + call("get_weather", NESTED),
    "a call that is cut": THOUGHT + call("get_weather", NESTED)[:70],
    "thought alone": "<think>\nhm, so",
}


@pytest.fixture(scope="module")
def parse(pool):
    return pool.get("agents")


@pytest.fixture(scope="module")
def stock(pool):
    return pool.get("agents-target")


@pytest.fixture(scope="module")
def problems():
    return make_problems(10, seed=77)


def chat(server: Server, text: str, **body):
    messages = body.pop("messages", None) or [{"role": "user", "content": text}]
    reply = server.post(
        "/v1/chat/completions",
        {"model": "default", "temperature": 0, "max_tokens": 160}
        | {"messages": messages}
        | body,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(server: Server, text: str, **body):
    """Chunks of a streamed chat."""
    with requests.post(
        server.url + "/v1/chat/completions",
        json={"model": "default", "temperature": 0, "max_tokens": 160}
        | {"messages": [{"role": "user", "content": text}]}
        | {"stream": True, "stream_options": {"include_usage": True}}
        | body,
        stream=True,
        timeout=300,
    ) as reply:
        assert reply.status_code == 200, reply.text
        lines = [line for line in reply.iter_lines() if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


# -- Counts ----------


@pytest.mark.parametrize("custom", [{"parse_mode": "exact"}, WHOLE_DRAFT])
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_counts_end_where_the_answer_ends(
    parse, stock, problems, tokenizer, stop, custom
):
    """Red if anything counts tokens behind a stop: the engine's own counts, those of
    thinking or of drafts, logprobs, or metrics."""
    prompt = chat_ids(tokenizer, problems[0].prompt)
    before = settled_tokens(parse)
    options = {"top": {"require_reasoning": True}, **stop}
    found = parse.generate(prompt, custom=custom, **options)
    meta = found["meta_info"]
    counted = meta["completion_tokens"]
    assert len(found["output_ids"]) == counted
    assert meta["reasoning_tokens"] <= counted
    assert meta["spec_num_correct_drafts"] < counted
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(k * num for k, num in enumerate(histogram)) < counted
    assert 0 < settled_tokens(parse, above=before) - before <= counted
    if "parse_mode" in custom:
        alone = stock.generate(prompt, **options)
        assert outcome(found) == outcome(alone)
        assert meta["reasoning_tokens"] == alone["meta_info"]["reasoning_tokens"]
        options["top"] |= {"return_logprob": True, "top_logprobs_num": 2}
        with_logprobs = parse.generate(prompt, custom=custom, **options)["meta_info"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert len(with_logprobs[name]) == alone["meta_info"]["completion_tokens"]


def realtime_tokens(server: Server) -> float:
    """Tokens decoded, as the server's metrics count them."""
    text = requests.get(server.url + "/metrics", timeout=60).text
    found = re.findall(
        r'sglang:realtime_tokens_total\{[^}]*mode="decode"[^}]*\} ([0-9.e+]+)', text
    )
    return sum(map(float, found))


def settled_tokens(server: Server, above: float = -1.0) -> float:
    """Tokens decoded, once the count is above a number and stays what it is: the
    scheduler sends a step's tokens before it counts them."""
    end, last = time.monotonic() + 60, -1.0
    while time.monotonic() < end:
        found = realtime_tokens(server)
        if found == last and found > above:
            break
        last = found
        time.sleep(0.5)
    return last


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stop", [{"stop": ["Step 2"]}, {"stop_regex": ["Step [2]"]}])
def test_usage_of_chats_ends_where_the_answer_ends(parse, problems, n, stop):
    """Red if `usage` of a chat, streamed or not, counts thinking behind a stop."""
    options = {"custom_params": WHOLE_DRAFT, "n": n, **stop}
    usage = chat(parse, problems[0].prompt, **options)["usage"]
    last = streamed(parse, problems[0].prompt, **options)[-1]["usage"]
    for one in (usage, last):
        assert 0 < one["reasoning_tokens"] <= one["completion_tokens"] <= 20 * n


# -- Sessions ----------


@pytest.mark.parametrize("stop", [STOPS["string"], STOPS["expression"]])
def test_a_session_goes_on_from_where_the_answer_ended(
    parse, stock, problems, tokenizer, stop
):
    """Red if text behind a stop, which no client saw, is in the next turn's prompt."""
    turns = [chat_ids(tokenizer, one.prompt) for one in problems[:3]]
    exact = turns_of(parse, turns, {"parse_mode": "exact"}, **stop)
    assert exact == turns_of(stock, turns, None, **stop)
    secret = "Step 1: abc\nEND secret text that no client saw"
    forced = {"parse_draft": secret, "parse_threshold": 0}
    (first, second) = turns_of(parse, turns[:2], forced, stop=["END"])
    kept = len(tokenizer.encode("Step 1: abc\nEND"))
    assert second[0] - first[0] <= kept + len(turns[1])


def turns_of(server: Server, turns, custom, **options):
    """(prompt tokens, answer) of each turn of a session."""
    found = session(server, turns, custom=custom, **options)
    return [(one["meta_info"]["prompt_tokens"], one["text"]) for one in found]


# -- Streamed calls ----------


def merged(chunks):
    """What a client makes of a stream: (thinking, text, calls, reason) by choice."""
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found.setdefault(choice["index"], ["", "", {}, None])
            delta = choice["delta"]
            one[0] += delta.get("reasoning_content") or ""
            one[1] += delta.get("content") or ""
            for item in delta.get("tool_calls") or ():
                made = one[2].setdefault(item["index"], ["", ""])
                made[0] += item["function"].get("name") or ""
                made[1] += item["function"].get("arguments") or ""
            one[3] = choice["finish_reason"] or one[3]
    return {index: (*one[:2], calls_of(one[2]), one[3]) for index, one in found.items()}


def calls_of(calls):
    return [(name, parsed(arguments)) for name, arguments in calls.values()]


def parsed(arguments: str):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(
    ("answer", "n"),
    [*((one, 1) for one in ANSWERS.values()), (ANSWERS["three calls"], 2)],
    ids=[*ANSWERS, "three calls twice"],
)
def test_a_stream_brings_what_the_whole_answer_has(parse, answer, n):
    """Red if prose, a call or its arguments are lost where a step gives all of them.
    tests/unit/plugin/test_stream_pieces.py compares all parsers with single tokens."""
    body = {"tools": TOOLS, "tool_choice": "auto", "stop": ["@@"], "n": n}
    body |= {"max_tokens": 600}
    body["custom_params"] = {"parse_draft": answer + END, "parse_threshold": 0}
    found = merged(streamed(parse, "Weather?", **body))
    choices = chat(parse, "Weather?", **body)["choices"]
    assert len(found) == n
    for choice in choices:
        message = choice["message"]
        thinking, text, calls, reason = found[choice["index"]]
        assert thinking.strip() == (message.get("reasoning_content") or "").strip()
        if answer == ANSWERS["a call that is cut"]:
            assert [name for name, _ in calls] == ["get_weather"]
            continue
        assert text.strip() == (message["content"] or "").strip()
        functions = [item["function"] for item in message.get("tool_calls") or ()]
        assert len(calls) == answer.count("<tool_call>")
        assert calls == [(f["name"], json.loads(f["arguments"])) for f in functions]
        assert reason == choice["finish_reason"]


def test_a_stream_has_an_event_for_each_token(parse):
    """Red if pieces are larger than asked for, come out of order, or have counts that
    go back."""
    words = " ".join(str(i) for i in range(30))
    for size, most in ((None, 1), (8, 8), (4096, 200)):
        forced = {"parse_draft": words + END, "parse_threshold": 0}
        if size:
            forced["parse_stream_tokens"] = size
        chunks = list(parse.stream([7, 8], custom=forced, stop=["@@"]))
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
        steps = [b - a for a, b in itertools.pairwise(counts)]
        assert min(steps) >= 0 and max(steps[:-1], default=0) <= most
        assert chunks[-1]["text"].startswith(words)
        assert all(
            b["text"].startswith(a["text"]) for a, b in itertools.pairwise(chunks)
        )
        assert [bool(c["meta_info"]["finish_reason"]) for c in chunks[-2:]] == [0, 1]


# -- Thinking and conversations ----------


def test_lines_of_thinking_are_segments(parse):
    """Red if verdicts are given to an answer alone, or count as its tokens."""
    lines = "".join(f"Line {k} of it.\n" for k in range(5))
    text = f"<think>\n{lines}</think>\n\nIt is warm.{END}"
    custom = {"parse_draft": text, "parse_threshold": 0, "parse_segmenter": "line"}
    body = {"custom_params": custom, "stop": ["@@"], "return_meta_info": True}
    whole = chat(parse, "Weather?", **body)
    (choice,) = whole["choices"]
    assert choice["message"]["reasoning_content"].strip() == lines.strip()
    assert choice["message"]["content"].strip() == "It is warm."
    (told,) = choice["meta_info"]["parse"]
    assert told["kept_segments"] >= 6
    assert 0 < whole["usage"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_begins_behind_thinking(parse, stock, is_streamed):
    """Red if a draft that goes on behind the end of thinking, under a grammar, is read
    otherwise than single tokens of the stock server."""
    answer = ANSWERS["prose and a call"]
    body = {"tools": TOOLS, "regex": re.escape(answer), "max_tokens": 400}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    (found, usage), (expected, counts) = (
        answered(server, is_streamed, messages=ASKED, **body)
        for server in (parse, stock)
    )
    assert (
        found == expected == ("hm", "Let me look.", [("get_weather", {"city": "Rome"})])
    )
    for name in ("reasoning_tokens", "completion_tokens"):
        assert usage[name] == counts[name]


# The server's names, and the page of its KV.
PAIRS = {1: ("agents", "agents-target"), 16: ("paged", "paged-target")}
OWN = "completion_tokens"
CALLED = call("get_time", "{}")
ASKED = [{"role": "user", "content": "Weather?"}]


@pytest.mark.combines("pages", "radix cache", "grammar")
@pytest.mark.parametrize("page", PAIRS)
def test_a_conversation_finds_its_prefix(pool, problems, page):
    """Red if what a turn leaves in the radix cache is less than on the stock server, or
    if the draft model reads again what it has read or drafted in earlier turns."""
    cached, turns, marks = [], [], []
    for name, custom in zip(PAIRS[page], ({"parse_mode": "exact"}, None), strict=True):
        server = pool.get(name)
        server.flush()
        marks += [rows_read(server)] if custom else []
        messages, found = [], []
        for turn, problem in enumerate(problems):
            role = "tool" if turn % 3 == 1 else "user"
            messages.append({"role": role, "content": problem.prompt})
            body = {"messages": messages, "max_tokens": 24, "tools": TOOLS}
            if turn % 3:
                body["stop"] = ["Step 3"]
            else:
                body |= {"regex": re.escape(CALLED), "max_tokens": 120}
                body["chat_template_kwargs"] = {"enable_thinking": False}
            options = {"custom_params": custom, **body}
            (thinking, text, calls), usage = answered(server, turn % 2, **options)
            turns += [usage] * bool(custom)
            assert len(calls) == (turn % 3 == 0)
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
            text = CALLED if calls else thinking + text
            messages.append({"role": "assistant", "content": text})
        cached.append(found)
        marks += [rows_read(server)] if custom else []
    read = marks[1] - marks[0]
    # What the target computed too, and in each round the token it goes on from.
    asked, own = (sum(u[name] for u in turns) for name in ("prompt_tokens", OWN))
    most = asked - sum(cached[0]) + 2 * own + page * len(turns)
    assert (page > 1 or read > 0) and read <= most < asked / 2, (read, most, asked)
    assert cached[1][-1] > 100
    assert all(ours >= stocks - page for ours, stocks in zip(*cached, strict=True)), (
        cached
    )


def rows_read(server: Server) -> int:
    """Tokens that the draft model has read so far."""
    info = requests.get(server.url + "/server_info", timeout=60).json()
    return info["internal_states"][0]["parse"]["pass_rows"].get("read", 0)


def answered(server: Server, is_streamed, **body):
    """(thinking, text, calls) of an answer, and its usage."""
    if is_streamed:
        chunks = streamed(server, "", **body)
        thinking, text, calls, _ = merged(chunks)[0]
        return (thinking.strip(), text.strip(), calls), chunks[-1]["usage"]
    result = chat(server, "", **body)
    message = result["choices"][0]["message"]
    functions = [item["function"] for item in message.get("tool_calls") or ()]
    calls = [(f["name"], json.loads(f["arguments"])) for f in functions]
    parts = message.get("reasoning_content"), message["content"]
    return (*((part or "").strip() for part in parts), calls), result["usage"]
