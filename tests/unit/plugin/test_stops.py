"""The end of an answer whose round holds several stops, on SGLang's own Req."""

import inspect

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.plugin.stops import earliest_stop

TEXT = "Observation: foo\n\nThought: bar baz"


def sglangs_own(req, num):
    """Without our hook. Not kept in the module: SGLang patches modules that hold it."""
    return inspect.unwrap(Req._check_str_based_finish)(req, num)


class Letters:
    """A token a letter; 0 is a stop token without text."""

    eos_token_id = 1
    additional_stop_token_ids = None

    def decode(self, ids, **_):
        return "".join(chr(i) for i in ids if i > 1)

    def encode(self, text, **_):
        return [ord(c) for c in text]


def request(tokens, **params):
    tokenizer = Letters()
    sampling = SamplingParams(max_new_tokens=1000, **params)
    sampling.normalize(tokenizer)
    req = Req("r", "", [5], sampling, vocab_size=1 << 20)
    req.tokenizer = tokenizer
    req.output_ids = tokens
    return req


def end_of(tokens, sizes, **params):
    """(length of the answer, what ended it), tokens coming in runs of `sizes`."""
    req = request([], **params)
    for size in sizes:
        run, tokens = tokens[:size], tokens[size:]
        req.output_ids += run
        if earliest_stop(sglangs_own, req, len(run)) or req._check_token_based_finish(
            run
        ):
            break
    return req.finished_len, getattr(req.finished_reason, "matched", None)


CASES = {
    "listed later, comes first": {"stop": ["\n\n", "Observation:"]},
    "both in one place": {"stop": ["foo\n", "o\n"]},
    "one inside the other": {"stop": ["Thought: bar", "Thou"]},
    "ends before it begins": {"stop": ["foo\n\nThought", "\n\n"]},
    "a regex first": {"stop": ["Thought"], "stop_regex": ["f.o"]},
    "a string first": {"stop": ["Obs"], "stop_regex": ["f.o", "b.r"]},
    "regexes": {"stop_regex": ["ba[zr] b", "Th"]},
    "a regex anchored at the end": {"stop": ["Thought"], "stop_regex": ["foo$"]},
    "no stop": {"stop": ["nowhere", "never"]},
    "a token first": {"stop": ["Thought", "bar"], "stop_token_ids": [ord("f")]},
    "a token behind": {"stop": ["Obs", "bar"], "stop_token_ids": [ord("T")]},
    "a token that ends a string": {"stop": ["foo"], "stop_token_ids": [ord("o")]},
    "tokens are ignored": {
        "stop": ["Thought"],
        "stop_token_ids": [ord("f")],
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [2, 7, 20, 100])
def test_a_run_ends_where_single_tokens_end(params, size):
    """Red if an answer runs on past a stop of the request, or says that another ended
    it."""
    tokens = Letters().encode(TEXT)
    expected = end_of(tokens, [1] * len(tokens), **params)
    assert end_of(tokens, [size] * 100, **params) == expected


def test_a_failing_expression_ends_the_request_at_once():
    """Red if an expression that no search survives is tried behind each token, and
    told each time, or if a stop token behind it hides the error."""
    tokens = Letters().encode(TEXT)
    req = request(tokens, stop_regex=["f.o"], stop_token_ids=[ord("T")])
    req.sampling_params.stop_regex_strs = ["("]
    looked = []

    def look(one, num):
        looked.append(len(one.output_ids))
        return sglangs_own(one, num)

    assert earliest_stop(look, req, len(tokens))
    assert looked == [1] and req.output_ids is tokens
    assert "invalid stop_regex" in req.finished_reason.message


def test_sglang_alone_takes_the_first_of_the_list():
    """Red once SGLang does what earliest_stop is for."""
    req = request(Letters().encode(TEXT), stop=["\n\n", "Observation:"])
    assert sglangs_own(req, len(TEXT)) and req.finished_reason.matched == "\n\n"


def test_a_stop_that_single_tokens_miss_is_missed():
    """Red if exact mode ends an answer where the target alone goes on: SGLang looks
    back by as many tokens as the stop itself has, and a model may spell it in more."""
    tokens = Letters().encode("x" * 9 + "Thought" + "x" * 9)

    def end(sizes) -> int | None:
        req = request([], stop=["Thought"])
        req.sampling_params.stop_str_max_len = 3
        for size in sizes:
            run = tokens[len(req.output_ids) :][:size]
            req.output_ids += run
            if run and earliest_stop(sglangs_own, req, len(run)):
                return req.finished_len
        return None

    assert end([1] * 30) is None
    assert [end([size] * 30) for size in (5, 12, 30)] == [None] * 3


@pytest.mark.parametrize("stop", [{"stop": ["ab"]}, {"stop_regex": ["a[bc]"]}])
def test_a_long_round_is_searched_in_time(stop):
    """Red if every prefix of a long round is decoded, which takes seconds for some
    thousands of tokens."""
    tokens = Letters().encode("x" * 2000 + "ab" + "x" * 2000)
    req = request(tokens, **stop)
    decoded = []
    plain = req.tokenizer.decode
    req.tokenizer.decode = lambda ids: decoded.append(len(ids)) or plain(ids)
    assert earliest_stop(sglangs_own, req, len(tokens)) and req.finished_len == 2002
    assert req.output_ids == tokens
    assert sum(decoded) < 5 * len(tokens)
    decoded.clear()
    none = request(tokens[:2000], stop=["ab"])
    none.tokenizer = req.tokenizer
    assert not earliest_stop(sglangs_own, none, 2000)
    assert len(decoded) == 1  # one look at all of it


def test_text_that_later_tokens_change_is_searched_token_by_token():
    """Red if one look at a whole round misses a stop that a prefix of it holds."""

    class Cleans(Letters):
        clean_up_tokenization_spaces = True

        def decode(self, ids, **_):
            return super().decode(ids).replace(" .", ".")

    tokens = Letters().encode("foo . bar")
    req = request(tokens, stop=["o "])
    req.tokenizer = Cleans()
    assert earliest_stop(sglangs_own, req, len(tokens)) and req.finished_len == 4
