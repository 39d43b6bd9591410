"""The console script `sglang-parse`."""
