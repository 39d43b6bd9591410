"""A real language model, SmolLM2-135M-Instruct, for tests and a demonstration.

`python -m benchmarks.real_model` unpacks it into the cache.
"""

from benchmarks.real_model.real import RealModels, built_models, real_models

__all__ = ["RealModels", "built_models", "real_models"]
