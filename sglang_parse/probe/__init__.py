"""Verdicts from the target's hidden states, read by a linear probe (docs/probes.md).

The rest of the package works without this room: the engine knows its `VerdictSource`.
"""
