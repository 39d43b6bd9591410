"""Simulated rounds: the shipped engine and policy on a virtual clock, with fakes.

The target, the drafters and the KV slots are fakes that take modelled time. Every
figure that comes out of this package is simulated.
"""
