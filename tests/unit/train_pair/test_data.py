"""Training examples of the embedded pair: what is wrong in them, and what is asked."""

import random

import pytest

from benchmarks.train_pair.data import Examples, ProblemStream, wrong_lines
from benchmarks.train_pair.tokenizer import (
    QUESTION,
    SHORT_QUESTION,
    Encoder,
    judge_suffix,
    load_tokenizer,
)
from benchmarks.train_pair.train import BatchMaker, Stage, max_tokens
from sglang_parse.embedded import TARGET_PATH, task
from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.server import DEFAULT_JUDGE_SUFFIX, ParseConfig


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(load_tokenizer(TARGET_PATH))


def test_a_step_too_many_is_an_error_at_its_first_token(encoder):
    """Red if the kind of error drafts make most is not among the injected ones, or is
    labelled elsewhere than where the answer should have stood."""
    rng, stream, make = random.Random(1), ProblemStream(5), Examples(encoder)
    found = 0
    for _ in range(1000):
        problem = stream.take(rng.choice([4, 5, 6, 7]))
        n = len(problem.events)
        lines = wrong_lines(problem, rng, rng.choice("AB"))
        text = "".join(written for written, _ in lines)
        right = task.split_segments(task.render_answer(problem, "A"))
        if len(lines) != n + 2 or task.first_error(problem, text) != n:
            continue
        found += 1
        example = make.from_lines(problem, lines)
        assert example.first_bad == n
        assert example.wrong.index(1) == example.ends[n - 1]
        assert len(example.prompt) + len(example.answer) <= max_tokens(n + 1)
        assert right[-1].startswith("Answer") and lines[n][0].startswith("Step")
    assert found > 20


def test_questions_are_those_that_a_server_asks(encoder):
    """Red if the judge is trained on another suffix than the server attaches."""
    assert QUESTION == DEFAULT_JUDGE_SUFFIX
    for question in (QUESTION, SHORT_QUESTION):
        trained = judge_suffix(encoder.tokenizer, question)
        pairs = ParseConfig().verdict_pairs
        asked = build_judge_prompt(encoder.tokenizer, question, pairs)
        assert tuple(trained) == asked.suffix


def test_batches_ask_either_question(encoder):
    """Red if one of the two questions is never trained."""
    maker = BatchMaker(encoder, Stage("A", 1, batch=2, suffixes=2, seed=1))
    lengths = {len(suffix) for suffix in maker.suffixes}
    seen = set()
    for _ in range(20):
        batch = maker.batch()
        rows = batch.verdict_rows[0]
        seen.add(int(rows[1] - rows[0]))
    assert seen == lengths and len(lengths) == 2
