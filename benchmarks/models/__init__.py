"""Models that tests and benchmarks serve and the wheel does not hold."""

from pathlib import Path

#: A draft for the embedded target, with a tokenizer of its own.
OTHER_DRAFT_PATH = Path(__file__).parent / "other_draft"
#: An EAGLE-3 head of the embedded draft.
DRAFT_HEAD_PATH = Path(__file__).parent / "draft_head"
