"""Every seam taken in SGLang at start-up, and the worker that SGLang calls."""
