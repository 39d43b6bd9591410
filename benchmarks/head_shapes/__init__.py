"""Chains or trees for an EAGLE-3 head: `python -m benchmarks.head_shapes`."""
