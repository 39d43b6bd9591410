"""What is remembered of a request between rounds."""
