"""A tiny trained target/draft pair and the task family it was trained on."""

from pathlib import Path

TARGET_PATH = Path(__file__).parent / "target"
DRAFT_PATH = Path(__file__).parent / "draft"
HEAD_PATH = Path(__file__).parent / "head"
