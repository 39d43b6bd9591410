"""A tiny trained target/draft pair and the task family it was trained on."""

from pathlib import Path

TARGET_PATH = Path(__file__).parent / "target"
DRAFT_PATH = Path(__file__).parent / "draft"
# As skilled as the draft, with words, merges and ids of its own.
HEAD_PATH = Path(__file__).parent / "head"
# For --speculative-parse-config: the shorter of the two questions it was trained on.
CONFIG_PATH = Path(__file__).parent / "parse.json"
