"""The problems of a calibration: the embedded task's, or those of a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from sglang_parse.calibrate.answers import check_final
from sglang_parse.embedded.task import Problem, check_answer, make_problems


@dataclass(frozen=True)
class Item:
    """One problem. reference: what an answer is compared with; None if the file has no
    answer for it."""

    prompt: str
    reference: Problem | str | None = None

    def is_right(self, text: str) -> bool:
        """Whether the text answers it. It has a reference."""
        if isinstance(self.reference, Problem):
            return check_answer(self.reference, text)
        return check_final(text, str(self.reference))


def load_items(path: str, *, problems: int, seed: int) -> list[Item]:
    """`problems` items, the same for the same arguments, drawn by seed if there are
    more.

    path: of lines of JSON with `prompt` or `question`, and perhaps `answer`; "" for the
    embedded task. Raises ValueError if they cannot be read.
    """
    if not path:
        return [Item(p.prompt, p) for p in make_problems(problems, seed)]
    try:
        with open(path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.strip()]
    except (OSError, ValueError) as e:
        raise ValueError(f"{path!r} cannot be read as lines of JSON: {e}.") from e
    items = []
    for number, row in enumerate(rows):
        try:
            prompt, answer = row.get("prompt") or row["question"], row.get("answer")
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{path}: row {number} has no `prompt` or is no object "
                f"({type(e).__name__}: {e})."
            ) from e
        items.append(Item(str(prompt), None if answer is None else str(answer)))
    if problems < len(items):
        picked = sorted(random.Random(seed).sample(range(len(items)), problems))
        items = [items[i] for i in picked]
    return items
