"""What may be set: the server's flags and a request's options, each checked once."""
