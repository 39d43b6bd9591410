"""What text between two tokenizers costs: `python -m benchmarks.retokenise`.

`write` makes target tokens of drafted text, 256 of them. `follow` tells the draft of
kept text, round by round, up to an answer of 100,000 characters. Its milliseconds a
round must not depend on what stands before. Half of the rounds end otherwise than
drafted, so ids are made again there. Times are CPU time, which other programs do not
stretch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.models import OTHER_DRAFT_PATH
from benchmarks.provenance import provenance
from benchmarks.real_model import built_models
from sglang_parse.demo.load import load_tokenizer
from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder
from sglang_parse.drafting.transcript import Transcript
from sglang_parse.embedded import TARGET_PATH

DRAFT_TOKENS = 256
CHARACTERS = 100_000
# Characters that a round adds, and rounds of a reported part.
STEP, PARTS = 200, 5
TEXT = (
    "Step {k}: the quick naïve fox had {a} coins, finds {k} more on day {b}, and so "
    "now has {c}; isn't that enough? Nobody – not even Mira – said so.\n"
)


def long_text(num: int) -> str:
    lines, size = [], 0
    while size < num:
        k = len(lines)
        lines.append(TEXT.format(k=k, a=7 * k % 89, b=3 * k % 31, c=11 * k % 997))
        size += len(lines[-1])
    return "".join(lines)[:num]


def write_ms(target: TextEncoder) -> float:
    """Milliseconds to make 256 target tokens of drafted text; median of 50."""
    writer, text = DraftWriter(target), long_text(8 * DRAFT_TOKENS).encode()
    times = []
    for _ in range(50):
        start = time.process_time()
        ids = writer.write(text, most=DRAFT_TOKENS, whole=False)
        times.append(1e3 * (time.process_time() - start))
        text = text[: len(target.pieces.join(ids)) + 16]
    assert len(ids) == DRAFT_TOKENS
    return statistics.median(times)


def follow_ms(draft: TextEncoder) -> list[float]:
    """Milliseconds a round, median of each fifth of the answer."""
    text, transcript, times = long_text(CHARACTERS).encode(), Transcript(draft), []
    at = 0
    while at < len(text):
        known = text[at : at + STEP]
        ids, _ = draft.encode(known.decode(errors="ignore"))
        transcript.append(ids)
        if len(times) % 2:
            known = known[: STEP // 2] + b" other words" + known[STEP // 2 + 12 :]
        start = time.process_time()
        transcript.follow(at, known)
        times.append(1e3 * (time.process_time() - start))
        at += STEP
    size = len(times) // PARTS
    return [statistics.median(times[k * size : (k + 1) * size]) for k in range(PARTS)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON Lines")
    args = parser.parse_args()
    folders = {"embedded target": TARGET_PATH, "embedded draft": OTHER_DRAFT_PATH}
    if (models := built_models()) is not None:
        folders["SmolLM2-135M-Instruct"] = models.target
    rows = []
    for name, folder in folders.items():
        encoder = TextEncoder(load_tokenizer(str(folder)))
        row = {
            "tokenizer": name,
            "write_ms": round(write_ms(encoder), 3),
            "follow_ms": [round(ms, 3) for ms in follow_ms(encoder)],
        }
        print(json.dumps(row))
        rows.append(row | provenance())
    if args.out:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
