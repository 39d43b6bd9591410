"""What rounds read of SGLang's batches."""

from types import SimpleNamespace
from typing import Any


def plain_sampling(vocab_size: int, **more: Any) -> SimpleNamespace:
    """A SamplingBatchInfo without penalties or a logit processor."""
    return SimpleNamespace(
        **{
            "vocab_size": vocab_size,
            "penalizer_orchestrator": SimpleNamespace(is_required=False),
            "acc_additive_penalties": None,
            "acc_scaling_penalties": None,
            "has_custom_logit_processor": False,
        }
        | more
    )
