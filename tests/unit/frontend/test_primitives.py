"""The primitives under SGLang's own interpreter, against a backend made here."""

import dataclasses
import inspect
import typing
import warnings

import pytest

from tests.support.sgl_programs import ended, error_of

sgl = pytest.importorskip("sglang")

from sglang.lang.backend.base_backend import BaseBackend  # noqa: E402
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint  # noqa: E402
from sglang.lang.chat_template import get_chat_template  # noqa: E402
from sglang.lang.interpreter import StreamExecutor  # noqa: E402
from sglang.lang.ir import SglGen, SglSamplingParams, SglSelect  # noqa: E402

from sglang_parse import parse_gen, parse_verify  # noqa: E402
from sglang_parse.frontend import (  # noqa: E402
    adapter,
)
from sglang_parse.frontend.adapter import report_of  # noqa: E402
from sglang_parse.options.request import (  # noqa: E402
    REQUEST_TABLE,
    RequestOptions,
)

STEPS = ["Step 1: a.\n", "Step 2: b.\n", "Step 3: c.\n"]


def segment(k, text, outcome, score):
    return {
        "origin": "client",
        "outcome": outcome,
        "start": 10 * k,
        "token_ids": [7] * 10,
        "text": text,
        "text_start": sum(map(len, STEPS[:k])),
        "score": score,
    }


VERDICTS = [
    segment(0, STEPS[0], "kept", 0.9),
    segment(1, STEPS[1], "kept", 0.8),
    segment(2, STEPS[2], "rejected", 0.1),
]


class FakeBackend(BaseBackend):
    """Says "one two" to everything; remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.chat_template = get_chat_template("chatml")
        self.asked = []

    def _meta_info(self, custom):
        segments = VERDICTS if "parse_verify" in custom else []
        return {"parse": [{"mode": "semantic", "segments": list(segments)}]}

    def generate(self, s, sampling_params):
        kwargs = sampling_params.to_srt_kwargs()
        self.asked.append((s.text_, kwargs))
        return "one two", self._meta_info(kwargs.get("custom_params", {}))

    def generate_stream(self, s, sampling_params):
        _, meta_info = self.generate(s, sampling_params)
        yield "one", {"completion_tokens": 1}
        yield " two", meta_info


@sgl.function
def answer(s, question, **options):
    s += sgl.user(question)
    s += sgl.assistant(parse_gen("answer", 20, **options))


def run(program, backend, **options):
    state = program.run(backend=backend, **options)
    return ended(state)


# -- The seam -------------------------------------------------------------------------


def test_seam_exists_and_is_taken_once():
    """Red if SGLang renames the seam, or a second import wraps it twice."""
    adapter.install()
    taken = StreamExecutor._execute_gen
    assert list(inspect.signature(taken.__wrapped__).parameters) == ["self", "expr"]
    assert not hasattr(taken.__wrapped__, "__wrapped__")


def test_missing_seam_is_named(monkeypatch):
    """Red if a frontend without its seam would drop PARSE's options silently."""
    monkeypatch.setattr(adapter, "SEAM", "sglang.lang.interpreter.Nowhere.at_all")
    with pytest.raises(RuntimeError, match=r"no usable sglang\.lang.*Nowhere") as error:
        adapter.install.__wrapped__()
    assert "\n" not in str(error.value)


def test_sampling_params_reach_the_server_with_custom_params():
    """Red if RuntimeEndpoint stops sending to_srt_kwargs(), or a field is lost."""
    params = SglSamplingParams(
        max_new_tokens=3, stop=["x"], regex="a+", json_schema="{}", dtype="int"
    )
    ours = adapter.ParseSamplingParams.of(params, {"parse_mode": "exact"})
    expected = {**params.to_srt_kwargs(), "custom_params": {"parse_mode": "exact"}}
    assert ours.to_srt_kwargs() == expected
    fields = [f.name for f in dataclasses.fields(params)]
    assert [getattr(ours, f) for f in fields] == [getattr(params, f) for f in fields]
    for method in (RuntimeEndpoint.generate, RuntimeEndpoint.generate_stream):
        assert "**sampling_params.to_srt_kwargs()" in inspect.getsource(method)


def test_ordinary_gen_is_left_alone():
    """Red if sgl.gen beside parse_gen gets PARSE's options."""

    @sgl.function
    def both(s):
        s += parse_gen("a", threshold=0.9) + "," + sgl.gen("b")

    backend = FakeBackend()
    state = run(both, backend)
    assert state.text() == "one two,one two"
    (_, first), (_, second) = backend.asked
    assert first["custom_params"] == {"parse_threshold": 0.9, "parse_report": True}
    assert "custom_params" not in second
    assert state.stream_executor.backend is backend


# -- parse_gen ------------------------------------------------------------------------


def test_gen_sends_every_option_under_its_wire_name():
    options = {
        "threshold": 0.7,
        "segment": "line",
        "mode": "semantic",
        "draft": "Step 1",
        "keep_rule": "longest",
        "judge_every": 2,
        "window": 8,
        "judge_suffix": "Right?",
        "exact_tail": False,
        "exact_head": 4,
        "recover_segments": "all",
        "compose": False,
        "judge": "suffix",
    }
    backend = FakeBackend()
    state = run(answer, backend, question="Q", report=False, **options)
    (prompt, kwargs) = backend.asked[0]
    assert prompt.endswith("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")
    assert kwargs["max_new_tokens"] == 20
    wire = {("segmenter" if k == "segment" else k): v for k, v in options.items()}
    expected = {f"parse_{k}": v for k, v in wire.items()} | {"parse_report": False}
    assert kwargs["custom_params"] == expected
    assert state["answer"] == "one two"
    assert state.get_meta_info("answer")["parse"][0]["mode"] == "semantic"


def own_keywords(call, *others):
    """Keyword of one of our calls to its type, but for those of the call itself."""
    hints = typing.get_type_hints(call)
    names = inspect.signature(call).parameters
    return {k: hints[k] for k in names if k not in others}


def test_gen_has_a_keyword_for_every_option_in_the_table():
    """Red if the signature of parse_gen and the table of options differ."""
    sgl_gen = ("name", "max_tokens", "gen_args", "gen_kwargs")
    types = typing.get_type_hints(RequestOptions)
    rows = {row.keyword: types[row.name] for row in REQUEST_TABLE if row.keyword}
    found = own_keywords(parse_gen, *sgl_gen)
    assert found.pop("report") is rows.pop("report")  # on in programs, so never None
    assert found == {keyword: typed | None for keyword, typed in rows.items()}


def test_verify_has_a_keyword_for_every_option_of_a_verdict():
    """Red if the signature of parse_verify and the table of options differ."""
    types = typing.get_type_hints(RequestOptions)
    rows = {row.keyword: types[row.name] for row in REQUEST_TABLE if row.judges}
    found = own_keywords(parse_verify, "name", "text")
    assert found == {keyword: typed | None for keyword, typed in rows.items()}


def test_gen_takes_every_argument_of_sgl_gen():
    """Red if an argument of sgl.gen is lost on the way."""
    values = {
        "max_tokens": 1,
        "min_tokens": 2,
        "n": 1,
        "stop": ["s"],
        "stop_token_ids": [3],
        "stop_regex": "r",
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.8,
        "frequency_penalty": 0.9,
        "presence_penalty": 1.0,
        "ignore_eos": True,
        "return_logprob": True,
        "logprob_start_len": 4,
        "top_logprobs_num": 5,
        "return_text_in_logprobs": True,
        "dtype": int,
        "regex": "a",
        "json_schema": "{}",
    }
    names = set(inspect.signature(sgl.gen).parameters)
    assert names - {"name", "choices", "choices_method"} == set(values)
    ours, theirs = parse_gen("x", **values), sgl.gen("x", **values)
    assert ours.name == "x" and ours.sampling_params == theirs.sampling_params
    assert parse_gen("x", 5, 2).sampling_params.min_new_tokens == 2


def test_gen_with_choices_is_a_select():
    assert isinstance(parse_gen("x", choices=["a", "b"]), SglSelect)
    with pytest.raises(ValueError, match="choices and parse_threshold"):
        parse_gen("x", choices=["a", "b"], threshold=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 3}, "parse_gen: custom_params.parse_threshold is 3; expected"),
        ({"segment": "word"}, "parse_segmenter is 'word'; expected one of line"),
        ({"draft": 5}, "parse_draft is 5; expected"),
        ({"mode": "fast"}, "parse_mode is 'fast'; expected one of semantic"),
    ],
)
def test_wrong_options_are_named_when_the_call_is_written(options, message):
    with pytest.raises(ValueError, match=message):
        parse_gen("x", **options)


def test_prefix_tracing_passes_over_the_primitives():
    """Red if run_batch fails in SGLang's tracer, where arguments are expressions."""

    @sgl.function
    def program(s, previous):
        s += "A prefix that is the same for all of the programs in this batch, " * 2
        s += parse_gen("a", draft=previous) + parse_verify("b", previous)
        s += parse_verify("c", [previous, s["a"]])

    backend = FakeBackend()
    states = program.run_batch(
        [{"previous": "x"}, {"previous": "y"}], backend=backend, num_threads=1
    )
    drafts = [k["custom_params"].get("parse_draft") for _, k in backend.asked]
    assert drafts == ["x", None, None, "y", None, None]
    assert all(error_of(s) is None for s in states)


# -- parse_verify ---------------------------------------------------------------------


@sgl.function
def check(s, text, **options):
    s += sgl.user("Q")
    s += sgl.assistant_begin()
    s += parse_verify("check", text, **options)
    s += parse_gen("rest")
    s += sgl.assistant_end()


@pytest.mark.parametrize("text", [STEPS, "".join(STEPS)], ids=["list", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_verify_keeps_the_valid_prefix_in_the_prompt(text, stream):
    backend = FakeBackend()
    state = run(
        check,
        backend,
        text=text,
        threshold=0.6,
        stream=stream,
        max_new_tokens=50,
        min_p=0.5,
    )
    kept = STEPS[0] + STEPS[1]
    assert state["check"] == kept
    report = state.get_meta_info("check")["parse"][0]
    assert report["scores"] == [0.9, 0.8, 0.1]
    assert report["cut"] == {"segments": 2, "tokens": 20, "chars": len(kept)}
    (_, verify), (prompt, _) = backend.asked
    assert verify["custom_params"] == {"parse_verify": text, "parse_threshold": 0.6}
    assert verify["max_new_tokens"] == 1 and verify["min_p"] == 0
    assert prompt.endswith("assistant\n" + kept)
    assert state.text().endswith(kept + "one two<|im_end|>\n")


# -- Without PARSE --------------------------------------------------------------------


def test_programs_that_cut_answers_by_tokens_are_refused():
    """Red if SGLang's API speculation cuts a judged text and nobody is told."""

    @sgl.function(num_api_spec_tokens=4)
    def program(s):
        s += parse_verify("check", STEPS)

    backend = FakeBackend()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        state = program.run(backend=backend)
        assert "num_api_spec_tokens is 4; expected none" in str(error_of(state))
    assert not backend.asked


def test_aborted_request_says_so():
    """Red if an operator's abort reads as the wrong kind of server."""
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    with pytest.raises(RuntimeError, match="aborted: Abort in waiting queue"):
        report_of(FakeBackend(), {"finish_reason": reason})


def test_primitives_are_ordinary_expressions():
    """Red if roles, lists or separate_reasoning stop taking them as an SglGen."""
    assert isinstance(parse_gen("a"), SglGen) and isinstance(
        parse_verify("b", "x"), SglGen
    )
    assert (parse_gen("a") + "x").expr_list[0].name == "a"
