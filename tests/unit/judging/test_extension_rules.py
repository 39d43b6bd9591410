"""Segmenters of installed packages: what they return is checked on every draft."""

import itertools

import pytest

from sglang_parse.judging import extension_rules, segmenter
from sglang_parse.judging.extension_rules import checked_rule, rising_offsets
from sglang_parse.judging.segmenter import Segmenter
from sglang_parse.options import segmenters
from sglang_parse.options.extensions import ExtensionError, Extensions
from tests.support.packages import install

TEXTS = ["a", ";", "b"]
DRAFT = [0, 1, 2, 2, 1, 0]
MODULE = """
def clause(draft):
    assert draft.text == draft.previous_text + "".join(draft.pieces)
    return [i + 1 for i, text in enumerate(draft.pieces) if text == ";"]

def bad(draft):
    return [len(draft.pieces) + 1]
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    values = {
        "clause": "parse_test_clause:clause",
        "bad": "parse_test_clause:bad",
        "number": "parse_test_clause:__name__",
    }
    group = {"sglang_parse.segmenters": values}
    install(tmp_path, "my-package", group, {"parse_test_clause": MODULE})
    monkeypatch.syspath_prepend(tmp_path)
    extensions = Extensions("segmenter", ("step",), "a function")
    for module in (segmenters, extension_rules):
        monkeypatch.setattr(module, "SEGMENTER_EXTENSIONS", extensions)
    monkeypatch.setattr(segmenter, "RULES", dict(segmenter.RULES))


def boundaries(name, **options):
    return Segmenter(name, TEXTS).boundaries(DRAFT, max_segments=9, **options)


def test_a_packages_rule_cuts_like_a_built_in_one(package):
    """Red if a package's rule is not asked, or misses what is added to every rule: the
    end of an ended draft."""
    assert boundaries("clause", ended=False) == (2, 5)
    assert boundaries("clause", ended=True) == (2, 5, 6)


def test_bad_offsets_of_a_package_raise_an_extension_error(package):
    """Red if the engine cannot tell a package's fault from its own."""
    with pytest.raises(ExtensionError) as raised:
        boundaries("bad", ended=False)
    assert (raised.value.kind, raised.value.name) == ("segmenter", "bad")
    assert "offset 7 comes behind 0 in a draft of 6" in str(raised.value.__cause__)


def test_what_is_no_function_is_refused_when_it_is_loaded(package):
    """Red if the first draft finds out."""
    with pytest.raises(ValueError, match="'number' of my-package 1.0 .*of type str"):
        Segmenter("number", TEXTS)


@pytest.mark.parametrize(
    "values",
    [[0], [-1], [7], [2, 2], [3, 2], [True], [1.0], ["1"], [None], 3, None, [1, [2]]],
)
def test_anything_but_rising_offsets_is_an_error(values):
    """Red if a boundary that is none reaches the layout of a pass."""
    rule = checked_rule("mine", lambda draft: values)
    with pytest.raises(ExtensionError):
        rule(type("Draft", (), {"pieces": "abcdef"}))


def test_good_offsets_pass_as_ints():
    """Red if a generator, a tuple or numpy's integers are refused; a list without end
    is left where it leaves the draft."""
    numpy = pytest.importorskip("numpy")
    assert rising_offsets((i for i in (1, 6)), 6) == [1, 6]
    found = rising_offsets(numpy.array([2, 4]), 6)
    assert found == [2, 4] and all(type(i) is int for i in found)
    assert rising_offsets((), 6) == []
    with pytest.raises(ValueError, match="offset 7 comes behind 6"):
        rising_offsets(itertools.count(1), 6)
