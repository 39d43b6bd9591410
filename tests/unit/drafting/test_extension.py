"""Drafters of installed packages: made at start-up, and checked as they write."""

import logging
from types import SimpleNamespace

import pytest

from sglang_parse.api import Drafter
from sglang_parse.drafting import create_drafters as registry
from sglang_parse.drafting import extension
from sglang_parse.drafting.extension import ExtensionDrafter, create_extension_drafters
from sglang_parse.options.extensions import Extensions
from tests.support.fake_engine import (
    LINE,
    STOP,
    VOCAB,
    FakeDrafter,
    FakeServer,
    FakeTarget,
    make_request,
)
from tests.support.packages import install

LINES = (20, 21, LINE, 22, 23, LINE)
MODULE = """
from sglang_parse.api import Drafter

class Copy(Drafter):
    name, token_level = "copy", False
    def __init__(self, context):
        self.context = context

class Chain(Copy):
    name, token_level, max_tokens = "chain", True, 4

class Boundless(Chain):
    name, max_tokens = "boundless", 0

class Reads(Copy):
    name, reads_features = "reads", True

def absent(context):
    return None

def raising(context):
    raise KeyError("no table")

class Bare:
    name, token_level = "bare", False
    def __init__(self, context):
        pass
"""


class Writer(Drafter):
    """Writes `tokens`, however many it may; raises where a step is named."""

    name = "mine"
    token_level = False

    def __init__(self, tokens=(), *, raises="", token_level=False):
        self.tokens, self.raises, self.token_level = tokens, raises, token_level
        self.max_tokens = 4 if token_level else 0

    def check(self, step):
        if step == self.raises:
            raise KeyError(step)

    def open(self, resources):
        self.check("open")

    def can_draft(self, r):
        self.check("can_draft")
        return True

    def draft(self, round):
        self.check("draft")
        for r in round:
            r.draft = r.draft.extended(
                self.name, self.tokens, ended=False, token_level=self.token_level
            )

    def after_pass(self, round):
        self.check("after_pass")


def serve(drafter, *, others=(), on_error=lambda error: None, **more):
    """A server with the drafter behind which `others` write; the target writes 30."""
    mine = ExtensionDrafter(drafter, VOCAB, on_error)
    mine.open(None)
    target = FakeTarget(lambda tokens: 30, lambda tokens: 0.9)
    return FakeServer(target, [mine, *others], **more)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package; its drafters are looked for."""
    monkeypatch.syspath_prepend(tmp_path)
    extensions = Extensions("drafter", ("model", "eagle3"), "a function")
    monkeypatch.setattr(extension, "DRAFTER_EXTENSIONS", extensions)

    def offer(**values):
        values = {k: f"parse_test_drafters:{v}" for k, v in values.items()}
        group = {"sglang_parse.drafters": values}
        install(tmp_path, "my-package", group, {"parse_test_drafters": MODULE})

    return offer


CONTEXT = SimpleNamespace(vocab_size=VOCAB, config=SimpleNamespace(draft_url=""))


def test_drafters_take_turns_by_kind(package, monkeypatch):
    """Red if a package's drafter writes behind the draft model, which fills the window,
    or before one that works token by token."""
    package(copy="Copy", chain="Chain", none="absent")
    built_in = [
        FakeDrafter(lambda tokens: (), name="model"),
        FakeDrafter(lambda tokens: (), name="eagle3", token_level=True),
    ]
    creates = [lambda context, d=d: d for d in built_in]
    monkeypatch.setattr(registry, "DRAFTERS", creates)
    found = registry.create_drafters(CONTEXT)
    assert [d.name for d in found] == ["eagle3", "chain", "copy", "model"]
    assert found[1]._drafter.context is CONTEXT


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("copy", "Kopy", "cannot be imported (AttributeError: module"),
        ("model", "Copy", "has a name that is malformed or built in"),
        ("other", "Copy", "(ValueError: its drafter's name is 'copy'"),
        ("copy", "raising", "cannot be used (KeyError: 'no table'"),
        ("bare", "Bare", "(TypeError: its drafter has no max_tokens; subclass Drafter"),
        ("boundless", "Boundless", "(ValueError: its max_tokens is 0 and token_level"),
        ("reads", "Reads", "(ValueError: it has runners or reads_features"),
    ],
)
def test_broken_drafter_is_left_out_with_a_warning(
    package, caplog, name, value, reason
):
    """Red if a package that no flag names stops the server, or nobody learns of it."""
    package(**{name: value})
    with caplog.at_level(logging.WARNING):
        assert create_extension_drafters(CONTEXT, lambda error: None) == []
    (told,) = caplog.messages
    assert reason in told and f"the drafter {name!r} of my-package 1.0" in told


def test_the_draft_model_writes_behind_a_package():
    """Red if what a package wrote is lost to the next drafter, or the window counts
    twice."""
    model = FakeDrafter(lambda tokens: (24, 25, LINE, 26))
    server = serve(Writer(LINES), others=[model])
    (r,) = server.round(make_request(window=9))
    assert r.draft.parts == (("mine", 6), ("model", 3))
    assert r.boundaries == (3, 6, 9)


def test_draft_ends_at_a_stop_token():
    """Red if a token behind the end of the response is drafted, or the end is not
    noticed."""
    server = serve(Writer((20, LINE, STOP, 21)))
    (r,) = server.round(make_request(window=9))
    assert (r.draft.tokens, r.draft.ended) == ((20, LINE), True)


def test_draft_ends_where_a_grammar_does_not_allow_it():
    """Red if a package has to know grammars, or a token against one is drafted."""

    class Grammar:
        is_dead = False

        def walk(self, tokens):
            return len(tokens[: tokens.index(22)])

    writer = ExtensionDrafter(Writer(LINES), VOCAB, lambda error: None)
    writer.open(None)
    server = serve(Writer())
    req = make_request(window=9)
    (r,) = server.round(req)
    r.draft, r.grammar, r.window, r.budgets = type(r.draft)(), Grammar(), 9, {"mine": 9}
    writer.draft([r])
    assert r.draft.tokens == (20, 21, LINE)


@pytest.mark.parametrize("bad", [(VOCAB,), (-1,), ("a",), (20,) * 10, (None,)])
def test_drafts_that_cannot_be_are_no_drafts(bad):
    """Red if what is no token, or is too long for the room, reaches the pass."""
    names = []
    model = FakeDrafter(lambda tokens: LINES)
    server = serve(Writer(bad), others=[model], on_error=None)
    server.engine.drafters.on_error = names.append
    req = make_request(window=6)
    server.round(req)
    assert names == ["mine"] and req.state.failed_drafters == {"mine"}
    assert req.output_ids == [12, *LINES, 30]


@pytest.mark.parametrize("step", ["open", "can_draft", "draft", "after_pass"])
def test_drafter_that_raises_costs_no_token(step):
    """Red if an error of a package's drafter ends a round, or is not counted once for
    the request."""
    names, errors = [], []
    model = FakeDrafter(lambda tokens: LINES)
    writer = Writer(raises=step)
    server = serve(writer, others=[model], on_error=lambda e: errors.append(e.name))
    server.engine.drafters.on_error = names.append
    req = make_request(window=6)
    server.round(req)
    server.round(req)
    assert names + errors == ["mine"]
    assert req.output_ids[:8] == [12, *LINES, 30]


def test_parse_compose_keeps_token_level_drafters_out():
    """Red if a request cannot keep out what drafts token by token."""
    writer = ExtensionDrafter(Writer(token_level=True), VOCAB, lambda error: None)
    writer.open(None)
    for compose in (True, False):
        r = SimpleNamespace(state=make_request(compose=compose).state)
        assert writer.can_draft(r) is compose
