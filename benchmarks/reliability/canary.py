"""Answers that must not change, and exact answers that equal the target's."""

from __future__ import annotations

import json
import random

from benchmarks.reliability.cases import GENERATE, Case
from benchmarks.reliability.traffic import answer, difference, greedy
from sglang_parse.embedded.task import make_problems

NUM_CANARIES = 2
SEED = 77


class Canaries:
    """A few prompts with the target's own answers.

    url: the PARSE server. target_url: a server of the target alone, or "" to take what
    the PARSE server answers in mode `off` before anything else is sent.
    """

    def __init__(self, url: str, target_url: str = "", num: int = NUM_CANARIES) -> None:
        self.url = url
        self.prompts = [p.prompt for p in make_problems(num, seed=SEED)]
        mode = None if target_url else "off"
        self.expected = [
            tuple(answer(target_url or url, prompt, mode)["output_ids"])
            for prompt in self.prompts
        ]

    def case(self, rng: random.Random) -> Case:
        """One of them for the traffic, in exact mode or in none."""
        at = rng.randrange(len(self.prompts))
        mode = rng.choice(("exact", "exact", "off"))
        body = {"text": self.prompts[at], "sampling_params": greedy(mode)}
        return Case(GENERATE, json.dumps(body), True, expected=self.expected[at])

    def wrong(self) -> list[str]:
        """One sentence for each answer that is not the target's."""
        found = []
        pairs = zip(self.prompts, self.expected, strict=True)
        for prompt, expected in list(pairs)[:NUM_CANARIES]:
            for mode in ("exact", "off"):
                told = self._differs(prompt, mode, expected)
                if told:
                    found.append(f"canary in mode {mode}: {told}: {prompt!r}")
        return found

    def _differs(self, prompt: str, mode: str, expected: tuple[int, ...]) -> str:
        try:
            got = answer(self.url, prompt, mode)["output_ids"]
        except (RuntimeError, OSError) as e:
            return str(e)
        return difference(got, expected)
