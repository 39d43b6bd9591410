"""What is told afterwards: the report of a request and the server's counters."""
