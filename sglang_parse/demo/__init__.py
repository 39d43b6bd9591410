"""Servers on this machine, a client that measures them, and the figures of a run."""
