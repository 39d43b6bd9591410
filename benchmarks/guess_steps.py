"""How many draft steps guesses save on texts, without any model.

    python -m benchmarks.guess_steps
    python -m benchmarks.guess_steps --texts "src/**/*.py" --tokenizer DRAFT

Each text stands for a draft of one request, read in windows of 100 tokens one request
after the other, with the table of `sglang_parse.drafting.guesses` as a server has it.
Without --texts the texts are answers of the embedded task in the draft's phrasing.
"""

from __future__ import annotations

import argparse
import glob
from collections.abc import Sequence

from benchmarks.embedded_answers import render_answer
from sglang_parse.demo.load import load_tokenizer
from sglang_parse.drafting.draft_model import MOST_GUESSES
from sglang_parse.drafting.guesses import GuessTable
from sglang_parse.embedded import DRAFT_PATH
from sglang_parse.embedded.task import make_problems

WINDOW, MOST_TOKENS, NUM_TEXTS = 100, 800, 200


def count_steps(texts: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """(tokens, draft steps, rows) of all texts."""
    table, num_steps, num_rows = GuessTable(), 0, 0
    for text in texts:
        at = 0
        while at < len(text):
            most = min(MOST_GUESSES, len(text) - at - 1) if table.pays else 0
            found = table.guess(text[max(0, at - 3) : at], most)
            right = 0
            while right < len(found) and found[right] == text[at + right]:
                right += 1
            at += right + 1
            num_steps, num_rows = num_steps + 1, num_rows + 1 + len(found)
        table.learn([], text)
    return sum(map(len, texts)), num_steps, num_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", metavar="GLOB", help="files; ** for all folders")
    parser.add_argument("--tokenizer", default=str(DRAFT_PATH), help="a model folder")
    args = parser.parse_args()
    if args.texts:
        texts = []
        for path in sorted(glob.glob(args.texts, recursive=True))[:NUM_TEXTS]:
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    else:
        texts = [render_answer(p, "B") for p in make_problems(NUM_TEXTS, seed=7)]
    if not texts:
        parser.error(f"--texts is {args.texts!r} and matches no file")
    encode = load_tokenizer(args.tokenizer).encode
    ids = [encode(text, add_special_tokens=False)[:MOST_TOKENS] for text in texts]
    parts = [i[at : at + WINDOW] for i in ids for at in range(0, len(i), WINDOW)]
    tokens, steps, rows = count_steps(parts)
    print(
        f"{tokens} tokens: {steps / tokens:.2f} draft steps a token "
        f"({tokens / steps:.2f} tokens a step), {rows / tokens:.2f} rows a token"
    )


if __name__ == "__main__":
    main()
