"""Training of probes (sglang_parse/probe)."""
