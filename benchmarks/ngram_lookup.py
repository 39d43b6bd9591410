"""What the n-gram drafter's look-up costs: `python -m benchmarks.ngram_lookup`.

Text that never repeats is the worst case that is common: every new token looks for a
place and finds none. Text that repeats is followed token by token. Prints microseconds
a token for answers behind prompts of several lengths, and milliseconds to index a
prompt, both of CPU time. It measures this machine now; nothing is written.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

from sglang_parse.drafting.ngram import NgramDrafter

PROMPTS = (0, 1_000, 10_000, 100_000)
ANSWER = 4_000
VOCAB = 150_000


class State:
    """As much of a request's state as the drafter reads; a weak key."""

    def __init__(self) -> None:
        self.options = SimpleNamespace(compose=True)
        self.ready: tuple[int, ...] = ()
        self.failed_drafters: set[str] = set()


def measure(prompt: list[int], answer: list[int]) -> tuple[float, float]:
    """Milliseconds to index the prompt, microseconds a token of the answer."""
    drafter = NgramDrafter(VOCAB)
    req = SimpleNamespace(origin_input_ids=prompt, output_ids=answer[:1])
    r: Any = SimpleNamespace(req=req, state=State())
    started = time.process_time()
    drafter.evidence(r)
    indexed = time.process_time()
    for token in answer[1:]:
        req.output_ids.append(token)
        drafter.evidence(r)
        drafter.take_outcomes()
    ended = time.process_time()
    return 1e3 * (indexed - started), 1e6 * (ended - indexed) / (len(answer) - 1)


def main() -> None:
    rng = random.Random(0)
    few = [rng.randrange(12) for _ in range(ANSWER + max(PROMPTS))]
    print("prompt tokens | ms to index | us a token: new, chance matches, copied")
    for num in PROMPTS:
        prompt = [rng.randrange(VOCAB) for _ in range(num)]
        new = [rng.randrange(VOCAB) for _ in range(ANSWER)]
        source = prompt or new[:1000]
        copied = (source * (ANSWER // len(source) + 1))[:ANSWER]
        index_ms, new_us = measure(prompt, new)
        chance_us = measure(few[ANSWER : ANSWER + num], few[:ANSWER])[1]
        copied_us = measure(prompt, copied)[1]
        print(
            f"{num:>8} {index_ms:8.2f} {new_us:8.2f} {chance_us:8.2f} {copied_us:8.2f}"
        )


if __name__ == "__main__":
    main()
