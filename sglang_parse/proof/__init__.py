"""The proof at start: each fast path of the server compared with a plain one."""
