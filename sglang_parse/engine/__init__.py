"""One round of PARSE: draft, segment, verify, cut, commit."""
