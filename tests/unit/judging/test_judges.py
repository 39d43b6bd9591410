"""The server's judge: a question, or what an installed package asks."""

import pytest
import torch

from sglang_parse.judging import judges
from sglang_parse.judging.judges import (
    ExtensionJudge,
    checked_judge,
    make_judge,
    open_judge,
    question_scores,
)
from sglang_parse.judging.prompt import JudgePrompt
from sglang_parse.options import judge_names as names
from sglang_parse.options.extensions import ExtensionError, Extensions
from sglang_parse.options.request import RequestOptions
from sglang_parse.options.server import ParseConfig
from tests.support.fake_engine import make_request
from tests.support.packages import install

MODULE = """
import torch

class Half:
    name = "half"
    def suffix(self, tokenizer):
        return [len(tokenizer) - 1, 3]
    def scores(self, logits):
        return torch.full((len(logits),), 0.5, dtype=torch.float16)

class Empty(Half):
    name = "empty"
    def suffix(self, tokenizer):
        return []

class Beyond(Half):
    name = "beyond"
    def suffix(self, tokenizer):
        return [len(tokenizer)]

class Mute:
    name = "mute"
    def suffix(self, tokenizer):
        return [1]

instance = Half()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of judges; gives what it offers."""
    offered = {"half": "Half", "empty": "Empty", "beyond": "Beyond", "mute": "Mute"}
    offered |= {"other": "instance"}
    values = {name: f"parse_test_judges:{value}" for name, value in offered.items()}
    group = {"sglang_parse.judges": values}
    install(tmp_path, "my-package", group, {"parse_test_judges": MODULE})
    monkeypatch.syspath_prepend(tmp_path)
    extensions = Extensions("judge", ("question",), "a judge", functions=False)
    for module in (names, judges):
        monkeypatch.setattr(module, "JUDGE_EXTENSIONS", extensions)
    return extensions


def test_a_packages_judge_is_asked_with_one_suffix(package):
    """Red if a package's judge is opened for nothing, or its suffix follows a
    question."""
    judge = open_judge("half", range(40), (("Yes", "No"),))
    assert judge.name == "half"
    assert judge.ask("Anything?").suffix == judge.ask("Else?").suffix == (39, 3)
    logits = torch.zeros(3, 40)
    assert judge.scores(logits, [judge.ask("")] * 3) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mute", "cannot be used (TypeError: it has no method scores); expected a jud"),
        ("other", "cannot be used (TypeError: its name is 'half'); expected a judge"),
        (
            "empty",
            "(suffix() failed: ValueError: it has no tokens); expected token ids",
        ),
        ("beyond", "(suffix() failed: ValueError: 40 is no token id below 40); expec"),
    ],
)
def test_judge_that_cannot_work_is_told_in_a_sentence(package, name, reason):
    """Red if the first pass finds out, or nobody learns whose judge it is."""
    with pytest.raises(ValueError) as raised:
        open_judge(name, range(40), ())
    text = str(raised.value)
    start = f"the judge {name!r} of my-package 1.0 (entry point group sglang_parse.jud"
    assert text.startswith(start) and reason in text


@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(2),
        torch.zeros(3, 1),
        torch.tensor([0.5, 0.5, 1.01]),
        torch.tensor([0.5, -0.01, 0.5]),
        torch.tensor([0.5, float("nan"), 0.5]),
        [0.5, 0.5, 0.5],
        None,
        RuntimeError("no"),
    ],
)
def test_bad_scores_raise_an_extension_error(package, scores):
    """Red if scores of a wrong shape or range decide what is kept."""

    def give(logits):
        if isinstance(scores, Exception):
            raise scores
        return scores

    judge = ExtensionJudge(package.found["half"], range(40))
    judge._judge.scores = give
    with pytest.raises(ExtensionError) as raised:
        judge.scores(torch.zeros(3, 40), [None] * 3)
    assert (raised.value.kind, raised.value.name) == ("judge", "half")
    assert raised.value.__cause__ is not None


def test_a_judge_may_be_an_object_or_a_class(package):
    """Red if only one of the two forms is taken."""
    assert make_judge(package.found["half"]).name == "half"
    judge = make_judge(package.found["half"])
    assert checked_judge("half", judge) is judge


def test_question_scores_take_each_rows_own_question():
    """Red if all rows are read with the verdict words of one question."""
    logits = torch.log(torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]]))
    yes, no = (JudgePrompt((7,), (pair,)) for pair in ((0, 1), (1, 0)))
    assert question_scores(logits, [yes, no, no]) == pytest.approx([0.8, 0.2, 0.6])


def test_another_judge_takes_no_question(package):
    """Red if a question is set, by the server or by a request, that nobody asks."""
    for setting in ({"judge_suffix": "Right?"}, {"verdict_tokens": "yes/no"}):
        assert ParseConfig(**setting)
        with pytest.raises(ValueError, match="--speculative-parse-judge is 'half', wh"):
            ParseConfig(judge="half", **setting)
    config = ParseConfig(judge="half")
    req = make_request()
    assert RequestOptions.of(req, config)
    req.sampling_params.custom_params["parse_judge_suffix"] = "Right?"
    assert RequestOptions.of(req, ParseConfig())
    with pytest.raises(
        ValueError, match=r"parse_judge_suffix is 'Right\?' and this se"
    ):
        RequestOptions.of(req, config)
