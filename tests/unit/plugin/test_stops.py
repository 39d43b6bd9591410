"""Where a step's tokens end, against single tokens, on SGLang's own Req."""

import inspect
import time

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.plugin.stops import look_at_last_token, num_kept
from sglang_parse.requests.state import stop_token_ids
from sglang_parse.shield import bounded_stops

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


def request(tokens, *, vocab_size=1 << 20, **params):
    tokenizer = Letters()
    sampling = SamplingParams(**{"max_new_tokens": 5000, **params})
    sampling.normalize(tokenizer)
    req = Req("r", "", [5], sampling, vocab_size=vocab_size)
    req.tokenizer = tokenizer
    req.output_ids = tokens
    return req


class Grammar:
    """Allows digits, and ends behind the third."""

    finished = False

    def __init__(self):
        self.walked = []

    def accept_token(self, token):
        if not chr(token).isdigit():
            raise ValueError("not in the grammar")
        self.walked.append(token)

    def rollback(self, num):
        del self.walked[len(self.walked) - num :]

    def is_terminated(self):
        return len(self.walked) >= 3


def give(req, run):
    """Give a run of tokens to SGLang's request as its scheduler does."""
    num = num_kept(req, run, stop_token_ids(req, frozenset()))
    for token in run[:num] if req.grammar else ():
        req.grammar.accept_token(token)
    req.output_ids += run[:num]
    req._check_str_based_finish = lambda n=1: look_at_last_token(sglangs_own, req, n)
    req.update_finish_state(num)
    return num


def end_of(tokens, sizes, **params):
    """(tokens of the answer, what ended it), tokens coming in runs of `sizes`."""
    req = request([], **params)
    for size in sizes:
        run, tokens = tokens[:size], tokens[size:]
        if not run or req.finished():
            break
        give(req, run)
    assert req.finished_len in (None, len(req.output_ids))
    reason = req.finished_reason
    return len(req.output_ids), reason and reason.to_json()


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
    "a length first": {"stop": ["Thought"], "max_new_tokens": 9},
    "a length with a stop": {"stop": ["foo"], "max_new_tokens": 16},
    "a length behind": {"stop": ["foo"], "max_new_tokens": 17},
    "no token of the vocabulary": {"vocab_size": ord("t")},
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


@pytest.mark.parametrize("text", ["1234567", "12", "12x45"])
def test_a_run_ends_where_its_grammar_ends(text):
    """Red if tokens behind the end of a grammar are counted, if the grammar stands
    elsewhere than before the run, or if a refused token is lost, whose error SGLang
    tells."""
    req = request([])
    req.grammar = Grammar()
    tokens = Letters().encode(text)
    kept = num_kept(req, tokens, frozenset())
    assert kept == (len(text) if "x" in text else min(3, len(text)))
    if "x" not in text:
        assert req.grammar.walked == []
        assert give(req, tokens) == kept and req.finished() == (kept == 3)


def test_a_failing_expression_ends_the_request_at_once():
    """Red if an expression that no search survives is tried behind each token, or if a
    stop token behind it hides the error."""
    tokens = Letters().encode(TEXT)
    req = request([], stop_regex=["f.o"], stop_token_ids=[ord("T")])
    req.sampling_params.stop_regex_strs = ["("]
    assert give(req, tokens) == 1
    assert "invalid stop_regex" in req.finished_reason.message


def test_sglang_alone_takes_the_first_of_the_list():
    """Red once SGLang ends the answer where single tokens would."""
    req = request(Letters().encode(TEXT), stop=["\n\n", "Observation:"])
    assert sglangs_own(req, len(TEXT)) and req.finished_reason.matched == "\n\n"


def test_a_stop_that_single_tokens_miss_is_missed():
    """Red if exact mode ends an answer where the target alone goes on: SGLang looks
    back by as many tokens as the stop itself has, and a model may spell it in more."""
    tokens = Letters().encode("x" * 9 + "Thought" + "x" * 9)
    for size in (1, 5, 12, 30):
        req = request([], stop=["Thought"])
        req.sampling_params.stop_str_max_len = 3
        for at in range(0, len(tokens), size):
            give(req, tokens[at : at + size])
        assert not req.finished() and len(req.output_ids) == len(tokens)


@pytest.mark.parametrize("stop", [{"stop": ["ab"]}, {"stop_regex": ["a[bc]"]}])
def test_a_long_round_is_searched_in_time(stop):
    """Red if every prefix of a long round is decoded, which takes seconds for some
    thousands of tokens."""
    tokens = Letters().encode("x" * 2000 + "ab" + "x" * 2000)
    req = request([], **stop)
    decoded = []
    plain = req.tokenizer.decode
    req.tokenizer.decode = lambda ids: decoded.append(len(ids)) or plain(ids)
    assert num_kept(req, tokens, ()) == 2002 and req.output_ids == []
    assert sum(decoded) < 8 * len(tokens)
    if "stop" in stop:
        assert len(decoded) < 20


def test_text_that_later_tokens_change_is_searched_token_by_token():
    """Red if one look at a whole round misses a stop that a prefix of it holds."""

    class Cleans(Letters):
        clean_up_tokenization_spaces = True

        def decode(self, ids, **_):
            return super().decode(ids).replace(" .", ".")

    req = request([], stop=["o "])
    req.tokenizer = Cleans()
    assert num_kept(req, Letters().encode("foo . bar"), ()) == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_an_expression_takes_bounded_time(monkeypatch, is_late):
    """Red if the search in a step's tokens freezes the scheduler, or if an answer goes
    on whose search SGLang is to end."""
    text = [ord(c) for c in "a" * 24 + " and"]
    req = request(text[:-4], stop_regex=["(.|.)*=#"])
    if is_late:
        monkeypatch.setattr(bounded_stops, "ANSWER_S", -1.0)
    started = time.thread_time()
    assert num_kept(req, text[-4:], set()) == (1 if is_late else 4)
    assert time.thread_time() - started < 5 * bounded_stops.SEARCH_S
