"""Judges: what the target is asked behind a prefix, and the score of its answer.

A server has one judge (`--speculative-parse-judge`). The built-in one asks a question,
which each request may choose; those of installed packages ask what they like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from sglang_parse.judging.prompt import JudgePrompt, build_judge_prompt
from sglang_parse.options.extensions import Extension, ExtensionError, described
from sglang_parse.options.judge_names import JUDGE_EXTENSIONS, QUESTION_JUDGE

if TYPE_CHECKING:
    from torch import Tensor

# Requests ask the built-in judge what they like; so many questions are kept.
NUM_CACHED = 64
METHODS = ("suffix", "scores")


class Judge(Protocol):
    """A judge of your own, named by an entry point of `sglang_parse.judges`.

    What it raises costs a round its verdicts: drafts are then followed token by token.
    """

    @property
    def name(self) -> str:
        """The name of its entry point."""

    def suffix(self, tokenizer: Any) -> Sequence[int]:
        """Token ids that the target reads behind each prefix, asked for at start-up.

        tokenizer: of the target, a Hugging Face tokenizer.
        """

    def scores(self, logits: Tensor) -> Tensor:
        """Scores from 0 to 1 of prefixes, [n]. A prefix is valid at the threshold.

        logits: [n, vocab], the target's behind the last token of each suffix.
        """


class QuestionJudge:
    """Asks a question in the model's chat format and compares yes with no.

    `ask` raises ValueError if the chat template cannot put the question.
    """

    name = QUESTION_JUDGE

    def __init__(
        self, tokenizer: Any, verdict_pairs: Sequence[tuple[str, str]]
    ) -> None:
        self.ask: Callable[[str], JudgePrompt] = lru_cache(NUM_CACHED)(
            lambda question: build_judge_prompt(tokenizer, question, verdict_pairs)
        )

    def scores(self, logits: Tensor, asked: Sequence[JudgePrompt]) -> list[float]:
        return question_scores(logits, asked)


class ExtensionJudge:
    """A judge of an installed package, checked each time it is asked.

    Raises ValueError, naming the package, if its suffix is not one of token ids.
    """

    def __init__(self, one: Extension, tokenizer: Any) -> None:
        self.name = one.name
        self._judge: Judge = make_judge(one)
        try:
            suffix = checked_suffix(self._judge.suffix(tokenizer), len(tokenizer))
        except Exception as e:
            told = one.sentence(
                f"cannot be used (suffix() failed: {described(e)})",
                "token ids of the target's tokenizer, at least one",
            )
            raise ValueError(told) from e
        self._asked = JudgePrompt(suffix)

    def ask(self, question: str) -> JudgePrompt:
        return self._asked

    def scores(self, logits: Tensor, asked: Sequence[Any]) -> list[float]:
        """Raises ExtensionError unless the judge gives a score for every row."""
        try:
            return checked_scores(self._judge.scores(logits), len(asked))
        except Exception as e:
            raise ExtensionError("judge", self.name, "failed on a pass") from e


#: The judge of a server, with its target's tokenizer at hand.
ServerJudge = QuestionJudge | ExtensionJudge


def open_judge(
    name: str, tokenizer: Any, verdict_pairs: Sequence[tuple[str, str]]
) -> ServerJudge:
    """The server's judge. Raises ValueError if an installed one cannot be used."""
    if name == QUESTION_JUDGE:
        return QuestionJudge(tokenizer, verdict_pairs)
    return ExtensionJudge(JUDGE_EXTENSIONS.found[name], tokenizer)


def make_judge(one: Extension) -> Judge:
    """Load a judge of an installed package. Raises ValueError if it is none."""
    judge: Judge = one.make(lambda found: checked_judge(one.name, found))
    return judge


def checked_judge(name: str, found: Any) -> Judge:
    """found: a judge, or a class of one. Raises TypeError on what it lacks."""
    judge: Judge = found() if isinstance(found, type) else found
    for method in METHODS:
        if not callable(getattr(judge, method, None)):
            raise TypeError(f"it has no method {method}")
    if getattr(judge, "name", None) != name:
        raise TypeError(f"its name is {getattr(judge, 'name', None)!r}")
    return judge


def checked_suffix(suffix: Sequence[Any], vocab_size: int) -> tuple[int, ...]:
    """Raises ValueError unless it holds token ids below vocab_size, at least one."""
    ids = tuple(suffix)
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"{token!r} is no token id below {vocab_size}")
    if not ids:
        raise ValueError("it has no tokens")
    return ids


def checked_scores(scores: Tensor, num: int) -> list[float]:
    """Raises ValueError unless there is a score from 0 to 1 for each of `num` rows."""
    if tuple(scores.shape) != (num,):
        raise ValueError(f"scores have the shape {tuple(scores.shape)}, not {(num,)}")
    values = [float(value) for value in scores.tolist()]
    for value in values:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"score {value} is not between 0 and 1")
    return values


def question_scores(logits: Tensor, asked: Sequence[JudgePrompt]) -> list[float]:
    """P(yes) / (P(yes) + P(no)) of each row, by the verdict tokens of its question."""
    from sglang_parse.judging.decide import verdict_scores

    verdict_ids = [prompt.verdict_ids for prompt in asked]
    scores: list[float] = verdict_scores(logits, verdict_ids).tolist()
    return scores
