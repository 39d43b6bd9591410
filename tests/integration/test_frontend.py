"""SGLang programs on the primitives, against the embedded pair's servers."""

import warnings

import pytest
import sglang as sgl

from benchmarks.embedded_answers import (
    first_error,
    render_answer,
    render_step,
    split_segments,
)
from sglang_parse import parse_gen, parse_verify
from sglang_parse.embedded.task import check_answer, make_problems
from sglang_parse.frontend import ParseUnavailableError
from tests.support.client import chat_ids
from tests.support.prefix_requests import judge_of, score_alone
from tests.support.sgl_programs import error_of

# As in test_scores.py: float32 sums in another order, through 24 layers.
TOLERANCE = 1e-3


def endpoint(server):
    return sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")


@pytest.fixture
def backend(parse):
    return endpoint(parse)


@pytest.fixture(scope="module")
def problems():
    return make_problems(6, seed=41)


@sgl.function
def solve(s, question, **options):
    s += sgl.user(question)
    s += sgl.assistant(parse_gen("answer", 160, temperature=0.0, **options))


@sgl.function
def check(s, question, text, **options):
    s += sgl.user(question)
    s += sgl.assistant(parse_verify("check", text, **options))


def report(state, name):
    (one,) = state.get_meta_info(name)["parse"]
    return one


def wrong_at(problem, k) -> str:
    """An answer whose step k is wrong and whose other steps are right."""
    lines = split_segments(render_answer(problem, "B"))
    total = problem.totals[k]
    wrong = total - 1 if total else total + 1
    lines[k - 1] = render_step(problem, k, f"B{2 - k % 2}", total=wrong)
    return "".join(lines)


# -- parse_gen ------------------------------------------------------------------------


def test_gen_answers_as_the_server_does(backend, parse, problems):
    """Red if a program's request differs from one made by hand."""
    state = solve.run(problems[0].prompt, backend=backend)
    prompt = state.text()[: -len(state["answer"] + "<|im_end|>\n")]
    custom = {"parse_report": True}
    by_hand = parse.generate(prompt, custom=custom, stop=["<|im_end|>"])
    assert state["answer"] == by_hand["text"]
    assert check_answer(problems[0], state["answer"])
    mine, theirs = report(state, "answer"), by_hand["meta_info"]["parse"][0]
    assert mine["segments"] == theirs["segments"] and mine["mode"] == "semantic"


def test_gen_in_batches_and_streams_gives_the_same(backend, problems):
    """Red if threads of a batch, or a stream, lose text, options or the report."""
    arguments = [{"question": p.prompt} for p in problems]
    states = solve.run_batch(arguments, backend=backend)
    for problem, state in zip(problems, states, strict=True):
        stream = solve.run(problem.prompt, backend=backend, stream=True)
        pieces = list(stream.text_iter("answer"))
        # SGLang drops what a program writes while its reader is not looking.
        assert error_of(stream) is None and stream["answer"] == state["answer"]
        assert state["answer"].startswith("".join(pieces))
        spans = [s["text"] for s in report(stream, "answer")["segments"]]
        assert spans == [s["text"] for s in report(state, "answer")["segments"]]


def test_forks_have_their_own_settings(backend, problems):
    """Red if branches of a program share the options of one call."""

    @sgl.function
    def compare(s, question):
        s += sgl.user(question)
        forks = s.fork(3)
        forks += sgl.assistant_begin()
        for fork, mode in zip(forks, ("semantic", "exact", "off"), strict=True):
            fork += parse_gen("answer", 160, mode=mode, temperature=0.0)
        modes = [report(fork, "answer")["mode"] for fork in forks]
        forks.join()
        return modes

    state = compare.run(problems[1].prompt, backend=backend)
    assert state.ret_value == ["semantic", "exact", "off"]
    _, exact, off = state["answer"]
    assert exact == off and check_answer(problems[1], exact)


def test_draft_is_kept_up_to_its_error(backend, problems):
    """Red if valid text of the client's is written again, or invalid text kept."""
    problem = problems[2]
    draft = wrong_at(problem, 3)
    state = solve.run(problem.prompt, draft=draft, backend=backend)
    answer, counts = state["answer"], report(state, "answer")
    assert answer.startswith("".join(split_segments(draft)[:2]))
    assert first_error(problem, answer) is None and check_answer(problem, answer)
    outcomes = [s["outcome"] for s in counts["segments"] if s["origin"] == "client"]
    assert outcomes[:3] == ["kept", "kept", "rejected"]
    kept = [s for s in counts["segments"] if s["outcome"] != "rejected"]
    assert "".join(s["text"] for s in kept) == answer
    for s in kept:
        assert answer[s["text_start"] :].startswith(s["text"])


# -- parse_verify ---------------------------------------------------------------------


def test_verify_scores_equal_one_prefill_each(parse, target, tokenizer, problems):
    """Red if the pass shows a verdict a prefix more or less than it should."""
    text = wrong_at(problems[4], 4)
    state = check.run(problems[4].prompt, text, backend=endpoint(parse))
    prompt = chat_ids(tokenizer, problems[4].prompt)
    prefix: list[int] = []
    for segment in report(state, "check")["segments"]:
        prefix += segment["token_ids"]
        alone = score_alone(target, judge_of(tokenizer), prompt, prefix)
        assert segment["score"] == pytest.approx(alone, abs=TOLERANCE)


def test_verify_cuts_before_the_first_error(backend, problems):
    """Red if the kept text, its cut or what the program goes on from is another."""

    @sgl.function
    def mend(s, question, text):
        s += sgl.user(question)
        s += sgl.assistant_begin()
        s += parse_verify("check", text)
        s += parse_gen("rest", 160, temperature=0.0)
        s += sgl.assistant_end()

    problem = problems[5]
    wrong = wrong_at(problem, 2)
    state = mend.run(problem.prompt, wrong, backend=backend)
    valid = split_segments(wrong)[0]
    assert state["check"] == valid
    cut = report(state, "check")["cut"]
    assert (cut["segments"], cut["chars"]) == (1, len(valid))
    answer = state["check"] + state["rest"]
    assert first_error(problem, answer) is None and check_answer(problem, answer)


def test_verify_options_reach_the_server(backend, problems):
    """Red if threshold or segmenter of a call are dropped."""
    problem = problems[0]
    text = render_answer(problem, "A")
    none = check.run(problem.prompt, text, threshold=2.0, backend=backend)
    assert none["check"] == "" and report(none, "check")["cut"]["tokens"] == 0
    fixed = check.run(problem.prompt, text, segment="fixed:5", backend=backend)
    sizes = {len(s["token_ids"]) for s in report(fixed, "check")["segments"][:-1]}
    assert sizes == {5}


# -- Without PARSE --------------------------------------------------------------------


def test_plain_server_is_named(target, problems):
    """Red if a program on a stock server fails without saying why."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        error = error_of(solve.run(problems[2].prompt, backend=endpoint(target)))
    assert isinstance(error, ParseUnavailableError)
    assert str(error).startswith(f"{target.url} does not serve PARSE; start it with")


def test_server_side_refusals_reach_the_program(backend, problems):
    """Red if HTTP 400 of a call becomes an empty answer."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        state = solve.run(problems[0].prompt, draft="x", top_p=5.0, backend=backend)
        assert "top_p" in str(error_of(state))
