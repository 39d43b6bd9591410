"""Simulated rounds: how close the policy comes to the bound and to an oracle."""
