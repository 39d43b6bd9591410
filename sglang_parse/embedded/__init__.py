"""A tiny trained target/draft pair and the task family it was trained on."""

from pathlib import Path

TARGET_PATH = Path(__file__).parent / "target"
DRAFT_PATH = Path(__file__).parent / "draft"
HEAD_PATH = Path(__file__).parent / "head"
DRAFT_HEAD_PATH = Path(__file__).parent / "draft_head"
# For --speculative-parse-config: the shorter of the two questions it was trained on.
CONFIG_PATH = Path(__file__).parent / "parse.json"
# What a first question may be: nothing but such sums has it learnt.
QUESTION = (
    "Tom has 5 apples. Day 1: buys 3. Day 2: sells 8. Day 3: finds 3. Day 4: drops 1. "
    "How many apples does Tom have now?"
)
