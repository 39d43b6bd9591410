"""What contract tests read of SGLang's functions."""

import inspect


def parameters(function) -> list[str]:
    """Names of a function's parameters, in order."""
    return list(inspect.signature(function).parameters)
