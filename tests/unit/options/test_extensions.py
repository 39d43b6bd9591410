"""Extensions of installed packages: found by metadata; the broken are told of."""

import sys

import pytest

from sglang_parse.options.extensions import Extensions
from tests.support.packages import install

GROUP = "sglang_parse.segmenters"


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Install a package that offers segmenters, and look for them."""
    monkeypatch.syspath_prepend(tmp_path)

    def install_and_find(values, name="my-package", modules=None):
        install(tmp_path, name, {GROUP: values}, modules)
        return Extensions("segmenter", ("step", "fixed"), "a function")

    yield install_and_find
    for module in ("parse_test_rules", "parse_test_broken"):
        sys.modules.pop(module, None)


def made(one):
    """The object behind an extension, as it is."""
    return one.make(lambda thing: thing)


def test_nothing_is_imported_before_it_is_needed(found):
    """Red if looking for names imports a package's module, or a made object is made
    again."""
    rules = {"parse_test_rules": "def proof(draft):\n    return [1]\n"}
    extensions = found({"proof": "parse_test_rules:proof"}, modules=rules)
    assert extensions.names() == ("proof",) and not extensions.check("prof", "--f")
    assert "parse_test_rules" not in sys.modules
    assert extensions.check("proof", "--f")
    rule = made(extensions.found["proof"])
    assert rule(None) == [1] and made(extensions.found["proof"]) is rule


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("parse_test_missing:proof", "cannot be imported (ModuleNotFoundError: No mod"),
        ("parse_test_broken:proof", "cannot be imported (ZeroDivisionError: division"),
        ("parse_test_rules:prof", "cannot be imported (AttributeError: module"),
        ("parse_test_rules:number", "is an object of type int"),
        ("parse_test_rules:wrong", "cannot be used (TypeError: no function)"),
    ],
)
def test_broken_one_is_told_in_a_sentence(found, target, reason):
    """Red if group, name, package or expectation are missing, or if a name that is
    broken stays on offer."""
    rules = "number = 3\ndef wrong(draft):\n    return []\n"
    modules = {"parse_test_broken": "1 / 0", "parse_test_rules": rules}
    extensions = found({"proof": target}, modules=modules)

    def build(thing):
        raise TypeError("no function")

    with pytest.raises(ValueError) as raised:
        extensions.found["proof"].make(build)
    text = str(raised.value)
    start = "the segmenter 'proof' of my-package 1.0 (entry point group " + GROUP
    assert text.startswith(f"{start}) {reason}") and text.endswith(
        "; expected a function."
    )
    assert "\n" not in text
    assert extensions.names() == ()
    with pytest.raises(ValueError, match="--f is 'proof': the .*; expected"):
        extensions.check("proof", "--f")


@pytest.mark.parametrize("name", ["step", "fixed", "fixed:9", "Proof", "a b", "x" * 41])
def test_malformed_or_built_in_name_is_a_fault(found, name):
    """Red if a package can replace a built-in rule, or take a name no flag can have."""
    extensions = found({name: "parse_test_rules:proof"})
    with pytest.raises(
        ValueError, match="malformed or built in; expected a lower case"
    ):
        made(extensions.found[name])
    assert extensions.names() == ()
