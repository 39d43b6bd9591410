"""Clients' texts, judged behind their prompts: drafts of theirs, and `parse_verify`."""
