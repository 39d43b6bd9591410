"""Pure functions of text and verdicts: where a draft is cut, what is kept."""
