"""Per-request state: which tokens end a request."""

from types import SimpleNamespace

from sglang_parse.requests.state import RequestState, stop_token_ids


def stop_request(**fields):
    params = {"ignore_eos": False, "stop_token_ids": None}
    params |= {k: v for k, v in fields.items() if k in params}
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    rest = {"eos_token_ids": None, "tokenizer": tokenizer}
    rest |= {k: v for k, v in fields.items() if k in rest}
    params = SimpleNamespace(**params)
    return SimpleNamespace(sampling_params=params, vocab_size=640, **rest)


def test_stop_ids_of_all_sources():
    """Red if a source is lost: the draft would run on past the end of the answer."""
    req = stop_request(stop_token_ids={7}, eos_token_ids={8})
    req.tokenizer.additional_stop_token_ids = [9]
    assert stop_token_ids(req, frozenset({3})) == {2, 3, 7, 8, 9}


def test_stop_ids_that_are_no_tokens_are_left_out():
    """Red if a request that lists one overflows the draft's table of stops, which stops
    the server; SGLang only looks whether a sampled token is among them."""
    req = stop_request(stop_token_ids={7, -1, 640, 1 << 63}, eos_token_ids={8})
    assert stop_token_ids(req, frozenset()) == {2, 7, 8}


def test_stop_ids_without_tokenizer_or_eos():
    """Red if None becomes a stop token."""
    assert stop_token_ids(stop_request(tokenizer=None), frozenset()) == set()
    req = stop_request()
    req.tokenizer.eos_token_id = None
    assert stop_token_ids(req, frozenset()) == set()


def test_ignore_eos_ignores_all_stop_tokens():
    """Red if the draft stops where SGLang does not (schedule_batch.py)."""
    req = stop_request(ignore_eos=True, stop_token_ids={7})
    assert stop_token_ids(req, frozenset({3})) == set()


def state(**more) -> RequestState:
    options = SimpleNamespace(mode="semantic")
    return RequestState(options, frozenset({2}), None, report=None, **more)


def test_a_response_is_ending_where_its_last_decided_token_is_a_stop():
    """Red if a request drafts on although what is decided ahead ends it."""
    assert [state(ready=r).is_ending for r in ((), (5, 2), (2, 5))] == [
        False,
        True,
        False,
    ]
