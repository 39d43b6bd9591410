"""Gold labels of judged prefixes, where a data set can check a prefix; pure.

The server that keeps pairs keeps no text. The one who asked has the answers' reports,
and in them the text of every judged prefix in the order of the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.embedded_answers import first_error
from sglang_parse.calibrate.problems import Item
from sglang_parse.embedded.task import Problem

#: A label that nobody knows.
UNKNOWN = -1
# A verdict of a report and one of a pair are the same number.
Verdicts = list[tuple[float, bool]]


def judged_prefixes(segments: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """(score, text) of each judged prefix. segments: of an answer's report.

    A rejected span stands behind the rejected ones of the same round before it.
    """
    kept, rejected = "", ""
    found = []
    for span in segments:
        if span["outcome"] == "rejected":
            rejected += span["text"]
        else:
            kept, rejected = kept + span["text"], ""
        if span["score"] is not None:
            found.append((span["score"], kept + rejected))
    return found


def gold_verdicts(item: Item, segments: Sequence[Mapping[str, Any]]) -> Verdicts:
    """(score of the question, whether the prefix is right) in the order of verdicts;
    none where nothing can check a prefix."""
    problem = item.reference
    if not isinstance(problem, Problem):
        return []
    found = judged_prefixes(segments)
    return [(score, first_error(problem, text) is None) for score, text in found]


def gold_label(verdicts: Sequence[tuple[float, bool]], index: int, score: float) -> int:
    """1 or 0 of the pair that is the request's verdict `index`; UNKNOWN where the
    report has another score there, as after a request lost its slots."""
    if index < len(verdicts) and verdicts[index][0] == score:
        return int(verdicts[index][1])
    return UNKNOWN
