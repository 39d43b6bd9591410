"""A real language model for tests and demonstrations, SmolLM2-135M-Instruct."""

from sglang_parse.models.real import RealModels, built_models, real_models

__all__ = ["RealModels", "built_models", "real_models"]
