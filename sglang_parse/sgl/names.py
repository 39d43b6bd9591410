"""The names under which SGLang knows PARSE. Entry points, which SGLang loads while it
is itself half imported, read them here: this module imports nothing."""

from __future__ import annotations

#: The value of --speculative-algorithm.
ALGORITHM = "PARSE"
#: The attention backend of the CPU platform, a value of --attention-backend. Its name
#: is here because `verify` and `cpu` are on one level and both need it.
CPU_ATTENTION_BACKEND = "parse_torch"
#: SGLang's own attention backend in plain torch, which can serve decode steps.
STOCK_TORCH = "torch_native"
#: That of sparse attention with an index, which has no way for a pass but decode rows.
SPARSE_ATTENTION = "dsa"


def is_parse(algorithm: object) -> bool:
    """Whether a value of --speculative-algorithm means PARSE, in any case: SGLang
    takes lower case too, and has upper case once the arguments are resolved."""
    return str(algorithm).upper() == ALGORITHM
