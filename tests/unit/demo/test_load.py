"""The load client's pure parts: reading a stream's last line, and the figures."""

import asyncio
import json
import re

import pytest

from benchmarks.embedded_answers import render_answer
from sglang_parse.demo import load
from sglang_parse.demo.figures import (
    RequestResult,
    kept_per_pass,
    summarise,
    target_passes,
)
from sglang_parse.demo.load import LoadError, encode_prompts, measure, read_result
from sglang_parse.embedded.task import make_problems


def make_result(**changes):
    fields = {
        "text": "",
        "token_ids": (),
        "num_tokens": 10,
        "correct": True,
        "latency_s": 1.0,
        "ttft_s": 0.1,
    }
    return RequestResult(**{**fields, **changes})


def test_summary_of_target_counts_a_pass_per_decoded_token():
    results = [make_result(num_tokens=11), make_result(num_tokens=31, correct=False)]
    summary = summarise("target", 1, results, wall_s=2.0)
    assert summary.output_tok_s == 21
    assert summary.requests_s == 1
    assert summary.accuracy == 0.5
    assert summary.passes_per_answer == 20
    assert summary.kept_per_pass is None and summary.ratio is None


def test_summary_of_parse_reads_passes_and_kept_tokens_from_reports():
    results = [
        make_result(report={"target_passes": 2, "kept_tokens": 30}),
        make_result(report={"target_passes": 6, "kept_tokens": 10}),
    ]
    assert kept_per_pass(results) == 5  # of all passes, not a mean of means
    assert target_passes(results[1]) == 6
    assert summarise("parse", 8, results, 4.0, baseline_tok_s=2.0).ratio == 2.5


def test_summary_needs_results():
    with pytest.raises(ValueError, match="'parse' at concurrency 8 has no results"):
        summarise("parse", 8, [], 1.0)


def last_line(text, **meta):
    meta = {"completion_tokens": 3, **meta}
    return (
        b"data: "
        + json.dumps(
            {"text": text, "output_ids": [5, 6, 7], "meta_info": meta}
        ).encode()
    )


def test_read_result_checks_the_answer_and_takes_the_one_report():
    (problem,) = make_problems(1, seed=0)
    line = last_line(render_answer(problem, "A"), parse=[{"target_passes": 1}])
    result = read_result(line, problem, latency_s=2, ttft_s=1)
    assert result.correct
    assert result.report == {"target_passes": 1}
    assert (result.num_tokens, result.token_ids) == (3, (5, 6, 7))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "no output"),
        (b'data: {"error": {"message": "too long"}}', "too long"),
        (
            b'data: {"text": "", "output_ids": [], "meta_info": {"finish_reason": '
            b'{"type": "abort", "message": "out of memory"}}}',
            "aborted: out of memory",
        ),
    ],
)
def test_read_result_reports_failures(line, message):
    (problem,) = make_problems(1, seed=0)
    with pytest.raises(LoadError, match=message):
        read_result(line, problem, latency_s=2, ttft_s=1)


class WordTokenizer:
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return f"<{messages[0]['role']}> {messages[0]['content']}"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def test_prompts_are_user_turns():
    (problem,) = make_problems(1, seed=0)
    (prompt,) = encode_prompts(WordTokenizer(), [problem])
    assert prompt.problem == problem
    assert prompt.input_ids[0] == len("<user>")
    assert len(prompt.input_ids) == 1 + len(problem.prompt.split())


def test_a_connection_that_the_server_closes_is_not_used_again():
    """Red if a request is lost on a connection that the server closes behind an answer,
    without having said so."""
    num = 0

    async def serve(reader, writer):
        nonlocal num
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])
        await reader.readexactly(length)
        num += 1
        body = b"data: {}\n"
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await writer.drain()
        # The next request on this connection would be read, and never answered.
        await reader.read(1)
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with load.open_session(1) as session:
            for _ in range(3):
                await load.post_stream(session, f"http://127.0.0.1:{port}", {})
        server.close()

    asyncio.run(ask())
    assert num == 3


def test_measure_names_a_server_that_is_not_there(monkeypatch):
    (problem,) = make_problems(1, seed=0)
    prompts = encode_prompts(WordTokenizer(), [problem])
    with pytest.raises(LoadError, match="http://127.0.0.1:9/generate failed"):
        measure("http://127.0.0.1:9", prompts, concurrency=1, warm_up=prompts)


def test_a_tokenizer_that_only_the_server_has_is_one_sentence(monkeypatch):
    """Red if a server that was started with a relative path ends a command in another
    folder with words about huggingface.co."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no tokenizer at 'target' here.*whole path"):
        load.load_tokenizer("target")
