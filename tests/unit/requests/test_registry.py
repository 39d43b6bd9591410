"""What the worker keeps of a request, and what it refuses."""

import gc
from types import SimpleNamespace

import pytest

from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options.request import REST
from sglang_parse.options.server import ParseConfig
from sglang_parse.requests.request_states import RequestStates
from tests.support.characters import Characters

JUDGE = JudgePrompt((7, 8), ((1, 2),))


class Request:
    """The fields of SGLang's Req that are read; a weak key like it."""

    def __init__(self, **custom_params) -> None:
        self.sampling_params = SimpleNamespace(
            custom_params=custom_params, frequency_penalty=0, presence_penalty=0,
            repetition_penalty=1, min_new_tokens=0, logit_bias=None, ignore_eos=False,
            stop_token_ids=None,
        )  # fmt: skip
        self.custom_logit_processor = self.grammar = self.input_embeds = None
        self.multimodal_inputs = None
        self.positional_embed_overrides = None
        self.tokenizer = self.refusal = None
        self.rid = "r"
        self.return_logprob = self.return_hidden_states = False
        self.eos_token_ids, self.output_ids = {9}, []
        self.vocab_size = 640


def refuse(req, refusal):
    req.refusal = refusal


def states(**changes) -> RequestStates:
    fields = {"tokenizer": Characters(), "make_judge": lambda question: JUDGE}
    return RequestStates(
        ParseConfig(), model_eos_ids=frozenset({3}), has_draft_model=True,
        has_token_level=False, refuse=refuse, **{**fields, **changes},
    )  # fmt: skip


def refuse_question(question):
    raise ValueError("The chat template changes the question.")


@pytest.mark.parametrize(
    ("custom_params", "changes", "message"),
    [
        ({"parse_mode": "fast"}, {}, "custom_params.parse_mode is 'fast'"),
        ({}, {"make_judge": refuse_question}, "chat template changes the question"),
        ({"parse_draft": "  "}, {}, "expected non-empty text"),
        ({"parse_draft": "\u200b"}, {"tokenizer": None}, "without tokens"),
    ],
)
def test_no_request_stops_the_scheduler(custom_params, changes, message):
    """Red if options that nobody checked before the scheduler raise in it."""
    if "tokenizer" in changes:
        changes = {"tokenizer": SimpleNamespace(encode=lambda *_, **__: [])}
    req = Request(**custom_params)
    state = states(**changes).of(req)
    assert req.refusal.status == 400 and message in str(req.refusal)
    assert state.options.mode == "off" and state.client is None


def test_a_fault_of_ours_ends_the_request_alone():
    """Red if what reading a request raises ends the server, or is told as the
    request's own fault."""

    def broken(question):
        raise KeyError("a bug")

    req = Request()
    state = states(make_judge=broken).of(req)
    assert req.refusal.status == 500 and "(KeyError)" in str(req.refusal)
    assert state.options.mode == "off"


@pytest.mark.parametrize(
    ("field", "embeds", "told"),
    [
        ("parse_draft", "input_embeds", "input_embeds"),
        ("parse_verify", "input_embeds", "input_embeds"),
        ("parse_draft", "multimodal_inputs", "prompt has images"),
        ("parse_verify", "multimodal_inputs", "prompt has images"),
    ],
)
def test_text_behind_embeddings_is_refused(field, embeds, told):
    """Red if the prompt's last token is computed again from an id that stands for an
    embedding."""
    req = Request(**{field: "abc"})
    setattr(req, embeds, [[0.0]])
    state = states().of(req)
    assert told in str(req.refusal) and state.client is None
    other = Request()
    setattr(other, embeds, [[0.0]])
    assert states().of(other).options.mode == "exact" and other.refusal is None


def test_states_go_with_their_requests():
    """Red if the server keeps something of every request that it has served."""
    known, running, ended = states(), Request(), Request()
    known.of(running)
    known.of(ended)
    assert known.count() == 2
    del ended
    gc.collect()
    assert known.count() == 1


def test_a_session_takes_no_text_to_verify():
    """Red if the one token that such a request returns becomes part of a session."""
    req = Request(parse_verify="abc")
    req.session = object()
    states().of(req)
    assert "parse_verify generates nothing" in str(req.refusal)
    other = Request(parse_draft="abc")
    other.session = object()
    assert states().of(other).client.tokens and other.refusal is None


@pytest.mark.parametrize("left", [2, REST])
def test_recovery_outlives_a_retraction(left):
    """Red if verdicts count again although the target was to write the rest."""
    known, req = states(), Request()
    known.of(req).recovering = left
    known.forget(req)
    known.forget(req)  # every chunk of its prefill
    assert known.of(req).recovering == left
    known.forget(req)
    assert known.of(req).recovering == left
    known.of(req).recovering = 0
    known.forget(req)
    assert known.of(req).recovering == 0


def test_what_a_verdict_denied_stays_suspect_over_a_retraction():
    """Red if the wrong one of several segments is no longer looked for; tokens that
    were decided ahead are written again."""
    known, req = states(), Request()
    known.of(req).num_suspect, known.of(req).ready = 9, (1, 2)
    known.forget(req)
    assert (known.of(req).num_suspect, known.of(req).recovering) == (11, 0)


def test_a_text_that_lost_its_slots_between_two_passes_is_sent_again():
    """Red if a request that was retracted while it waited for its verdicts generates
    what nobody asked for, or is told that it can never be served."""
    known, req = states(), Request(parse_verify="abc")
    assert known.of(req).client.tokens and req.refusal is None
    known.forget(req)
    req.output_ids = [5]
    known.of(req)
    assert req.refusal.status == 503
    assert "parse_verify lost its place" in str(req.refusal)
    assert str(req.refusal).endswith("send the request again later.")
    other = Request(parse_draft="abc")
    other.output_ids = [5]
    assert known.of(other).client.tokens and other.refusal is None
