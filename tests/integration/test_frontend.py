"""SGLang programs on the primitives, against the embedded pair's servers."""

import re
import warnings

import pytest
import requests
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


def test_turns_of_a_chat_are_separate_calls(backend, problems):
    @sgl.function
    def two_turns(s, first, second):
        s += sgl.user(first)
        s += sgl.assistant(parse_gen("a", 160, temperature=0.0))
        s += sgl.user(second)
        s += sgl.assistant(parse_gen("b", 160, temperature=0.0, mode="exact"))

    state = two_turns.run(problems[0].prompt, problems[1].prompt, backend=backend)
    assert report(state, "a")["mode"] == "semantic"
    assert report(state, "b")["mode"] == "exact"
    roles = [m["role"] for m in state.messages()]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert state.messages()[1]["content"] == state["a"]


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


def test_draft_in_exact_mode_changes_nothing(backend, target, problems):
    """Red if a client's draft gets into an exact answer."""
    problem = problems[3]
    state = solve.run(
        problem.prompt, draft=wrong_at(problem, 2), mode="exact", backend=backend
    )
    prompt = state.text()[: -len(state["answer"] + "<|im_end|>\n")]
    alone = target.generate(prompt, custom={"parse_mode": "off"})
    assert state["answer"] == alone["text"]


# -- parse_verify ---------------------------------------------------------------------


def sixteen(problem) -> list[str]:
    """An answer in 16 pieces of whole words."""
    words = re.findall(r"\S+\s*", render_answer(problem, "A"))
    ends = [len(words) * k // 16 for k in range(17)]
    pairs = zip(ends, ends[1:], strict=False)
    return ["".join(words[a:b]) for a, b in pairs]


def target_passes(server) -> int:
    """The server's own count over all requests."""
    info = requests.get(server.url + "/server_info", timeout=60).json()
    return info["internal_states"][0]["parse"]["target_passes"]


def test_verify_of_sixteen_prefixes_shares_passes(backend, parse, problems):
    """Red if prefixes get passes of their own. Their rows are two prefills of this
    server, and a pass has no more than one."""
    before = target_passes(parse)
    state = check.run(problems[4].prompt, sixteen(problems[4]), backend=backend)
    assert report(state, "check")["target_passes"] == 2
    assert len(report(state, "check")["scores"]) == 16
    assert target_passes(parse) == before + 2


@pytest.mark.parametrize("cut", [sixteen, lambda p: wrong_at(p, 4)], ids=["16", "text"])
def test_verify_scores_equal_one_prefill_each(parse, target, tokenizer, problems, cut):
    """Red if the pass shows a verdict a prefix more or less than it should."""
    state = check.run(problems[4].prompt, cut(problems[4]), backend=endpoint(parse))
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


def test_verify_keeps_all_of_a_right_answer(backend, problems):
    num_kept = 0
    for problem in problems:
        text = render_answer(problem, "A")
        state = check.run(problem.prompt, text, backend=backend)
        counts = report(state, "check")
        if min(s["score"] for s in counts["segments"]) >= 0.5:
            num_kept += 1
            assert state["check"] == text
            assert counts["cut"]["segments"] == len(problem.events) + 1
    # The judge is a model: it may reject a right line now and then.
    assert num_kept >= len(problems) - 1


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
