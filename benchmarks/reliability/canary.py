"""Answers that must not change, and exact answers that equal the target's."""

from __future__ import annotations

from benchmarks.reliability.traffic import answer
from sglang_parse.embedded.task import make_problems

NUM_CANARIES = 4
SEED = 77


class Canaries:
    """A few prompts with the target's own answers.

    url: the PARSE server. target_url: a server of the target alone, or "" to take what
    the PARSE server answers in mode `off` before anything else is sent.
    """

    def __init__(self, url: str, target_url: str = "") -> None:
        self.url = url
        self.prompts = [p.prompt for p in make_problems(NUM_CANARIES, seed=SEED)]
        mode = None if target_url else "off"
        self.expected = [
            answer(target_url or url, prompt, mode)["output_ids"]
            for prompt in self.prompts
        ]

    def wrong(self) -> list[str]:
        """One sentence for each answer that is not the target's."""
        found = []
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            for mode in ("exact", "off"):
                told = self._differs(prompt, mode, expected)
                if told:
                    found.append(f"canary in mode {mode}: {told}")
        return found

    def _differs(self, prompt: str, mode: str, expected: list[int]) -> str:
        try:
            got = answer(self.url, prompt, mode)["output_ids"]
        except (RuntimeError, OSError) as e:
            return str(e)
        if got == expected:
            return ""
        pairs = enumerate(zip(got, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
        return f"token {at} of {len(expected)} differs for {prompt!r}"
