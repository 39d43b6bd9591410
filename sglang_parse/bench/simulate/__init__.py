"""Rounds on a virtual clock: the shipped engine and policy, everything else is fake.

It lies in the package, not among the benchmarks, as `sglang-parse estimate` runs it
from an installation. Every figure that comes out of it is simulated.
"""
