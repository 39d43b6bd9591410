"""The end of an answer whose round holds several stops, on SGLang's own Req."""

import inspect

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.integration import stops
from sglang_parse.integration.stops import earliest_stop, locate_stop

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


@pytest.fixture(autouse=True)
def serves(monkeypatch):
    monkeypatch.setattr(stops, "serves_parse", lambda: True)


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


def test_sglang_alone_takes_the_first_of_the_list():
    """Red once SGLang does what earliest_stop is for."""
    req = request(Letters().encode(TEXT), stop=["\n\n", "Observation:"])
    assert sglangs_own(req, len(TEXT)) and req.finished_reason.matched == "\n\n"


def test_servers_without_parse_are_left_alone(monkeypatch):
    """Red if the ends of other servers' answers move."""
    monkeypatch.setattr(stops, "serves_parse", lambda: False)
    req = request(Letters().encode(TEXT), stop=["\n\n", "Observation:"])
    assert earliest_stop(sglangs_own, req, len(TEXT))
    assert req.finished_reason.matched == "\n\n"


def test_long_rounds_are_searched_by_halves():
    """Red if the end of a stop string is another than SGLang's, or every prefix of a
    long round is decoded."""
    own = inspect.unwrap(Req._locate_str_stop_finished_len)
    text = "x" * 700 + "ab" + "x" * 300 + "ab" + "x"
    for size in (1003, 1000, 500, 304, 200):
        req = request(Letters().encode(text), stop=["ab"])
        decoded = []
        plain = req.tokenizer.decode
        expected = own(req, size, stop_str="ab")
        req.tokenizer.decode = lambda ids, plain=plain, out=decoded: (
            out.append(len(ids)) or plain(ids)
        )
        assert locate_stop(own, req, size, stop_str="ab") == expected
        assert len(decoded) <= 11


@pytest.mark.parametrize(
    "more", [{"stop_str": "a\ufffd"}, {"stop_regex": "a."}, {"stop_str": "a"}]
)
def test_what_cannot_be_halved_is_left_to_sglang(more):
    """Red if text that later tokens change is searched by halves."""
    req = request(Letters().encode("a" * 100), stop=["a"])
    req.tokenizer.clean_up_tokenization_spaces = True
    asked = []
    locate_stop(lambda *a, **k: asked.append(k), req, 80, **more)
    assert len(asked) == 1
