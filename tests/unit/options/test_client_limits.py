"""What a server lets its clients set, by `--speculative-parse-client-options`."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from sglang_parse.options.client_limits import RULES, check_limits
from sglang_parse.options.request import REQUEST_TABLE, RequestOptions
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.flags import OPTIONS_ATTRIBUTE
from sglang_parse.plugin.openai import CHAT, ParseEndpoints
from sglang_parse.plugin.request_hooks import follow_request
from sglang_parse.requests.request_states import RequestStates
from tests.support.characters import Characters
from tests.support.fake_manager import FakeManager
from tests.unit.options.test_request import GOOD, request

FLAG = "--speculative-parse-client-options"
TEXTS = {
    "parse_draft": ["a text"],
    "parse_prediction": ["a text"],
    "parse_verify": ["a text", ["a", "b"]],
    "parse_judge": ["suffix", "probe", "auto"],
}
VALUES = {**GOOD, **TEXTS}
EVERY_VALUE = [(field, value) for field in VALUES for value in VALUES[field]]
# Settings of a server, what a request may set there, and what it may not.
ORDERS = [
    ({}, {"mode": ["semantic", "exact", "off"]}, {}),
    ({"mode": "exact"}, {"mode": ["exact", "off"]}, {"mode": ["semantic"]}),
    ({"mode": "off"}, {"mode": ["exact", "off"]}, {"mode": ["semantic"]}),
    ({}, {"threshold": [0.5, 0.7, 2.0]}, {"threshold": [0.0, 0.499]}),
    ({}, {"keep_rule": ["first-failure"]}, {"keep_rule": ["longest"]}),
    ({"keep_rule": "longest"}, {"keep_rule": ["first-failure", "longest"]}, {}),
    ({}, {"segmenter": ["step"]}, {"segmenter": ["line", "fixed:7", "fixed:999"]}),
    ({}, {"judge_every": [0, 1]}, {"judge_every": [2, 3, 1024]}),
    (
        {"judge_every": 3},
        {"judge_every": [0, 1, 2, 3]},
        {"judge_every": [4]},
    ),
    ({"judge_every": 2}, {"judge_every": [1, 2]}, {"judge_every": [0, 3]}),
    ({"judge_every": 1, "adaptive": False}, {"judge_every": [0, 1]}, {}),
    ({}, {"window": [1, 256]}, {"window": [0, 257]}),
    ({"window": 0}, {"window": [0, 1, 1 << 20]}, {}),
    ({}, {"judge_suffix": [ParseConfig.judge_suffix]}, {"judge_suffix": ["Hm?"]}),
    ({}, {"exact_tail": [True]}, {"exact_tail": [False]}),
    ({"exact_tail": False}, {"exact_tail": [True, False]}, {}),
    ({"exact_head": 4}, {"exact_head": [4, 5]}, {"exact_head": [0, 3]}),
    ({}, {"recover_segments": [1, 2, "all"]}, {"recover_segments": [0]}),
    ({"recover_segments": "all"}, {"recover_segments": ["all"]}, {}),
    ({"recover_segments": "all"}, {}, {"recover_segments": [0, 1024]}),
    ({}, {"judge": ["auto", "suffix"]}, {"judge": ["probe"]}),
    (
        {},
        {
            "compose": [True, False],
            "report": [True],
            "stream_tokens": [9],
            "draft": ["a"],
        },
        {},
    ),
]


def test_every_option_has_a_rule_and_values_to_try():
    """Red if an option is added that any client may set to anything, or that no test
    here sets."""
    names = {row.name for row in REQUEST_TABLE}
    assert set(RULES) == names
    assert {field.removeprefix("parse_") for field in VALUES} == names


@pytest.mark.parametrize(("settings", "allowed", "looser"), ORDERS)
def test_a_request_may_be_stricter_and_never_looser(settings, allowed, looser):
    """Red if the order of an option's values is turned around, or one is forgotten."""
    config = ParseConfig(**settings)
    for name, values in allowed.items():
        for value in values:
            check_limits({name: value}, config)
    for name, values in looser.items():
        for value in values:
            told = rf"custom_params\.parse_{name} is .*; expected .*{FLAG} safe\.$"
            with pytest.raises(ValueError, match=told):
                check_limits({name: value}, config)
            check_limits({name: value}, ParseConfig(**settings, client_options="all"))


@pytest.mark.parametrize("asked", [{"mode": "exact"}, {"mode": "off"}, {"verify": "a"}])
def test_what_changes_no_answer_is_open(asked):
    """Red if a client cannot ask its own question about a text, or is refused what has
    no effect on an exact answer."""
    loose = {"threshold": 0.0, "judge_suffix": "Hm?", "keep_rule": "longest"}
    check_limits({**asked, **loose}, ParseConfig())
    check_limits({"prediction": "a text", **loose}, ParseConfig())
    with pytest.raises(ValueError, match="parse_threshold"):
        check_limits({"prediction": "a", "mode": "semantic", **loose}, ParseConfig())


@pytest.mark.parametrize(("field", "value"), EVERY_VALUE, ids=repr)
def test_none_lets_no_request_set_anything(field, value):
    """Red if an option is forgotten where clients may set none."""
    config = ParseConfig(client_options="none")
    with pytest.raises(ValueError, match=f"{field} .*expected no PARSE.*{FLAG} none"):
        check_limits({field.removeprefix("parse_"): value}, config)
    check_limits({}, config)


# -- A server that nobody can make lossy ----------

EXACT = ParseConfig(mode="exact")


def served(custom_params) -> tuple[RequestOptions, list]:
    """How the scheduler serves a request, and what it refuses."""
    refused = []
    states = RequestStates(
        EXACT,
        tokenizer=Characters(),
        model_eos_ids=frozenset(),
        make_judge=lambda question: SimpleNamespace(question=question, suffix=(1,)),
        has_draft_model=True,
        has_token_level=True,
        refuse=lambda req, refusal: refused.append(str(refusal)),
    )
    req = Request(custom_params)
    return states.of(req).options, refused


class Request:
    """A Req as far as its state is made of it; SGLang's can be referred to weakly."""

    output_ids = ()
    eos_token_ids = tokenizer = None
    rid = "r"

    def __init__(self, custom_params):
        vars(self).update(vars(request(custom_params)))
        params = vars(self.sampling_params)
        params.update(ignore_eos=False, stop_token_ids=None)


@pytest.mark.parametrize("mode", [None, "semantic", "exact", "off"])
@pytest.mark.parametrize(("field", "value"), EVERY_VALUE, ids=repr)
def test_the_scheduler_of_an_exact_server_judges_no_answer(field, value, mode):
    """Red if any option, alone or beside a mode, has a request of an exact server
    answered with text that is judged, whatever brought it past the HTTP process."""
    options, refused = served(
        {"parse_mode": mode, field: value} if mode else {field: value}
    )
    judges = options.mode == "semantic" and not options.verify_only
    assert not judges
    asks = value if field == "parse_mode" else mode
    assert bool(refused) == (asks == "semantic" and field != "parse_verify")


def prediction(text) -> dict:
    return {"prediction": {"type": "content", "content": text}}


def as_text(custom) -> dict:
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in custom.items()}


# What brings options to a server: the path, and the body with them.
CARRIERS = {
    "generate": ("/generate", lambda c: {"sampling_params": {"custom_params": c}}),
    "batch": ("/generate", lambda c: {"sampling_params": [{}, {"custom_params": c}]}),
    "session": ("/generate", lambda c: {"session_params": c}),
    "chat": (CHAT, lambda c: {"custom_params": c}),
    "invocations": ("/invocations", lambda c: {"custom_params": c}),
    "metadata": (CHAT, lambda c: {"metadata": as_text(c)}),
    "completions": ("/v1/completions", lambda c: {"metadata": as_text(c)}),
    "prediction": (CHAT, lambda c: {**prediction("a"), "custom_params": c}),
    "empty": (CHAT, lambda c: {**prediction(""), "metadata": as_text(c)}),
}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    "custom",
    [
        {"parse_mode": "semantic"},
        {"parse_mode": "semantic", "parse_threshold": 0},
        {"parse_mode": "semantic", "parse_keep_rule": "longest", "parse_window": 0},
    ],
)
def test_no_carrier_makes_an_exact_server_judge(carrier, custom):
    """Red if a way in that SGLang or PARSE serves forgets the server's limits."""
    path, body_of = CARRIERS[carrier]
    with pytest.raises(ValueError, match=f"parse_mode is 'semantic'.*{FLAG} safe"):
        send(path, body_of(custom))


def send(path, body) -> None:
    """A body through the middleware, SGLang's request, and the hook on it. Raises
    ValueError with the sentence of HTTP 400."""
    manager = FakeManager()
    options = {"mode": "exact"}
    manager.server_args = SimpleNamespace(**{OPTIONS_ATTRIBUTE: options})
    told = []

    async def app(scope, receive, respond):
        body = json.loads((await receive())["body"])
        params = body.get(
            "sampling_params", {"custom_params": body.get("custom_params")}
        )
        obj = SimpleNamespace(sampling_params=params)
        async for _ in follow_request(outputs(), manager, obj):
            pass

    async def outputs():
        yield {"meta_info": {}}

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def respond(message):
        told.append(message.get("body", b""))

    scope = {"type": "http", "path": path, "headers": []}
    asyncio.run(ParseEndpoints(app, EXACT)(scope, receive, respond))
    if answer := b"".join(told):
        raise ValueError(json.loads(answer)["message"])
