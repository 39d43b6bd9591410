"""Models that tests and benchmarks serve and the wheel does not hold."""

from pathlib import Path

#: A draft for the embedded target, with a tokenizer of its own.
OTHER_DRAFT_PATH = Path(__file__).parent / "other_draft"
