"""A draft server that misbehaves, and what it costs."""
