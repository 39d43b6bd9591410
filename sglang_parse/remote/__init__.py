"""Drafts that an OpenAI-compatible server writes, as an optional drafter."""
