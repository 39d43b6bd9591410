"""A server that bounds what clients set, as `safe` and exact mode make it."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.embedded_answers import render_answer
from sglang_parse.embedded.task import make_problems
from tests.support.client import chat_ids
from tests.unit.options.test_client_limits import (
    CARRIERS,
    EVERY_VALUE,
    FLAG,
    VALUES,
)

pytestmark = pytest.mark.own_server
NUM_FUZZED = int(os.environ.get("SGLANG_PARSE_TEST_LIMITS_REQUESTS", "60"))
LENGTH = 16
LOOSEST = {
    **{"parse_threshold": 0, "parse_keep_rule": "longest", "parse_window": 0},
    **{"parse_segmenter": "fixed:999", "parse_judge": "probe"},
    **{"parse_judge_suffix": "Say Yes.", "parse_recover_segments": 0},
}
PROBLEMS = make_problems(6, seed=77)
WRONG = "Step 1: nothing is counted.\nAnswer: 20\n"
TEXTS = ("parse_draft", "parse_prediction", "parse_verify")


@pytest.fixture
def exact(pool):
    server = pool.get("exact")
    yield server
    assert server.is_alive(), "the test left the exact server dead"


class Asker:
    """Sends one problem to both servers in any carrier, and compares."""

    def __init__(self, exact, target, tokenizer):
        self.exact, self.target, self.tokenizer = exact, target, tokenizer
        self.known = {}

    def check(self, problem, carrier, custom) -> int:
        """200 where the answer is the target's, 400 where the request is refused, and
        401 where the sentence names the flag."""
        path, body_of = CARRIERS[carrier]
        body = {**self.asks(path, problem), **body_of(custom)}
        if "sampling_params" in body or path == "/generate":
            body["sampling_params"] = self.sampling(body, custom)
        if "parse_verify" in custom:
            body["max_tokens"] = 1
        reply = self.exact.post(path, body)
        if reply.status_code == 400:
            assert "parse_" in reply.text
            return 400 + (FLAG in reply.text)
        assert reply.status_code == 200, reply.text
        text, expected = self.text_of(reply.json()), self.expected(path, problem)
        if "parse_verify" in custom:  # one token or none comes back
            assert expected.startswith(text)
        else:
            assert text == expected
        return 200

    def asks(self, path, problem) -> dict:
        if path == "/generate":
            return {"input_ids": chat_ids(self.tokenizer, problem.prompt)}
        sampled = {"model": "default", "temperature": 0, "max_tokens": LENGTH}
        if path == "/v1/completions":
            return {**sampled, "prompt": problem.prompt}
        messages = [{"role": "user", "content": problem.prompt}]
        return {**sampled, "messages": messages}

    @staticmethod
    def sampling(body, custom) -> dict:
        length = 1 if "parse_verify" in custom else LENGTH
        plain = {"temperature": 0, "max_new_tokens": length}
        given = body.get("sampling_params", {})
        return {**(given[-1] if isinstance(given, list) else given), **plain}

    def expected(self, path, problem) -> str:
        key = path, problem.prompt
        if key not in self.known:
            body = self.asks(path, problem)
            if path == "/generate":
                body["sampling_params"] = self.sampling(body, {})
            self.known[key] = self.text_of(self.target.post(path, body).json())
        return self.known[key]

    @staticmethod
    def text_of(answer) -> str:
        if "text" in answer:
            return answer["text"]
        (choice,) = answer["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    def check_all(self, cases) -> list[int]:
        for problem, carrier, _ in cases:
            self.expected(CARRIERS[carrier][0], problem)
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda case: self.check(*case), cases))


@pytest.fixture
def asker(exact, target, tokenizer):
    return Asker(exact, target, tokenizer)


def test_no_option_changes_an_answer_of_an_exact_server(asker):
    """Red if a value of any option, beside a wrong draft and the loosest values of the
    others, has a token in an answer that is not the target's."""
    cases = [
        (PROBLEMS[at % 6], "generate", {**LOOSEST, **draft, field: value})
        for at, (field, value) in enumerate(EVERY_VALUE)
        for draft in [{} if field in TEXTS else {"parse_draft": WRONG}]
    ]
    statuses = asker.check_all(cases)
    assert statuses.count(401) == 1  # the mode
    assert statuses.count(200) >= len(cases) - 4  # without a probe none can judge


@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_carrier_changes_an_answer_of_an_exact_server(asker, carrier):
    """Red if a carrier of options forgets the server's bound."""
    for problem in PROBLEMS[:1]:
        has_text = carrier in ("prediction", "empty")
        text = {} if has_text else {"parse_draft": render_answer(problem, "B")}
        assert asker.check(problem, carrier, {**text, **LOOSEST}) == 200
        judged = {**text, **LOOSEST, "parse_mode": "semantic"}
        assert asker.check(problem, carrier, judged) == 401


def test_fuzzed_requests_get_the_targets_own_answers(asker):
    """Red if options together open what none of them opens alone."""
    rng = random.Random(56)

    def drawn():
        fields = rng.sample(list(VALUES), rng.randint(1, 6))
        custom = {field: rng.choice(VALUES[field]) for field in fields}
        for text in [field for field in TEXTS if field in custom][1:]:
            del custom[text]
        if "parse_draft" in custom:
            custom["parse_draft"] = rng.choice([WRONG, render_answer(PROBLEMS[0], "B")])
        carrier = rng.choice(list(CARRIERS))
        return rng.choice(PROBLEMS), carrier, custom

    cases = [drawn() for _ in range(NUM_FUZZED)]
    statuses = asker.check_all(cases)
    assert statuses.count(200) > NUM_FUZZED // 4
    assert statuses.count(401) > NUM_FUZZED // 60
