"""Extensions at start-up: what a flag asks for has to work."""

import pytest

from sglang_parse.judging import extension_rules, judges, segmenter
from sglang_parse.options import judge_names
from sglang_parse.options import segmenters as segmenter_names
from sglang_parse.options.extensions import Extensions
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin import model_checks
from tests.support.packages import install

MODULE = """
def good(draft):
    return []

class Good:
    name = "good"
    def suffix(self, tokenizer):
        return [1, 2]
    def scores(self, logits):
        return logits[:, 0]

class Silent(Good):
    name = "silent"
    def suffix(self, tokenizer):
        return []
"""


class Tokenizer:
    """As little of a tokenizer as an extension asks for here."""

    def __len__(self) -> int:
        return 40


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package with a good and a broken extension of each kind."""
    module = "parse_test_startup"
    groups = {
        "sglang_parse.segmenters": {"good": f"{module}:good", "bad": f"{module}:bad"},
        "sglang_parse.judges": {
            **{"good": f"{module}:Good", "bad": f"{module}:bad"},
            "silent": f"{module}:Silent",
        },
    }
    install(tmp_path, "my-package", groups, {module: MODULE})
    monkeypatch.syspath_prepend(tmp_path)
    found = Extensions("segmenter", ("step",), "a function")
    for one in (segmenter_names, extension_rules, model_checks):
        monkeypatch.setattr(one, "SEGMENTER_EXTENSIONS", found)
    found = Extensions("judge", ("question",), "a judge")
    for one in (judge_names, judges):
        monkeypatch.setattr(one, "JUDGE_EXTENSIONS", found)
    monkeypatch.setattr(segmenter, "RULES", dict(segmenter.RULES))
    monkeypatch.setattr(model_checks, "load_tokenizer", lambda *_, **__: Tokenizer())


def test_what_works_may_be_asked_for():
    """Red if a package's segmenter or judge is refused at start-up."""
    config = ParseConfig(segmenter="good", judge="good")
    model_checks.check_extensions(None, config)


@pytest.mark.parametrize(
    ("setting", "start"),
    [
        ({"segmenter": "bad"}, "--speculative-parse-segmenter is 'bad': the segmenter"),
        ({"judge": "bad"}, "--speculative-parse-judge is 'bad': the judge 'bad' of my"),
        ({"judge": "silent"}, "--speculative-parse-judge is 'silent': the judge 'sile"),
    ],
)
def test_broken_extension_that_a_flag_names_stops_the_server(setting, start):
    """Red if weights are loaded before anybody learns of it, or flag, package and
    expectation are missing."""
    with pytest.raises(ValueError) as raised:
        model_checks.check_extensions(None, ParseConfig(**setting))
    text = str(raised.value)
    assert text.startswith(start) and "my-package 1.0 (entry point group" in text
    assert "; expected " in text and text.endswith(".")
