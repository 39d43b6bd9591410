"""The one seam between PARSE's primitives and SGLang's frontend language.

SGLang's interpreter resolves the sampling parameters of an SglGen into a record of its
own, so nothing that an expression carries beyond them reaches the backend
(sglang/lang/interpreter.py, `_resolve_sampling_params`). The seam is therefore
`StreamExecutor._execute_gen`, taken with SGLang's own hook registry: while it executes
one of our expressions, the executor's backend is one that asks the expression. All the
rest (variables, events, streaming, forks, roles) stays SGLang's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import sglang
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglGen, SglSamplingParams
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SEAM = "sglang.lang.interpreter.StreamExecutor._execute_gen"
KEY = "parse"  # of meta_info
Answer = tuple[str, dict[str, Any]]  # text and meta_info


class ParseUnavailableError(RuntimeError):
    """The backend does not serve PARSE; the message says what to do."""


class ParseExpr(SglGen):
    """An SglGen that talks to the backend itself.

    gen: the expression whose name and sampling parameters are taken over.
    custom_params: of its request.
    """

    def __init__(self, gen: SglGen, custom_params: dict[str, Any]) -> None:
        super().__init__(gen.name)
        self.sampling_params = gen.sampling_params
        self.custom_params = custom_params

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}')"

    def generate(
        self, backend: Any, executor: StreamExecutor, params: SglSamplingParams
    ) -> Answer:
        """Text for the state and its meta_info. params: resolved by the executor."""
        raise NotImplementedError

    def generate_stream(
        self, backend: Any, executor: StreamExecutor, params: SglSamplingParams
    ) -> Iterator[Answer]:
        """The same in pieces; each meta_info replaces the one before it."""
        yield self.generate(backend, executor, params)


class ParseSamplingParams(SglSamplingParams):
    """Resolved sampling parameters that take custom_params along to the server."""

    custom_params: dict[str, Any]

    @classmethod
    def of(
        cls, params: SglSamplingParams, custom_params: dict[str, Any], **changes: Any
    ) -> ParseSamplingParams:
        values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        result = cls(**{**values, **changes})
        result.custom_params = custom_params
        return result

    def to_srt_kwargs(self) -> dict[str, Any]:
        return {**super().to_srt_kwargs(), "custom_params": self.custom_params}


class _AskingBackend:
    """The executor's backend during one expression: generation asks the expression."""

    def __init__(self, base: Any, expr: ParseExpr) -> None:
        self._base = base
        self._expr = expr

    def generate(
        self, executor: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Answer:
        return self._expr.generate(self._base, executor, sampling_params)

    def generate_stream(
        self, executor: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[Answer]:
        return self._expr.generate_stream(self._base, executor, sampling_params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _execute_gen(
    original: Callable[..., None], executor: StreamExecutor, expr: SglGen
) -> None:
    """AROUND hook on the seam. An executor runs one expression at a time."""
    if not isinstance(expr, ParseExpr):
        return original(executor, expr)
    if executor.num_api_spec_tokens is not None:
        raise ValueError(
            f"num_api_spec_tokens is {executor.num_api_spec_tokens}; expected none in "
            "a program with parse_gen or parse_verify, whose answers it would cut."
        )
    base = executor.backend
    executor.backend = _AskingBackend(base, expr)
    try:
        return original(executor, expr)
    finally:
        executor.backend = base


@functools.cache
def install() -> None:
    """Take the seam, once a process. Raises RuntimeError naming what is missing."""
    HookRegistry.register(SEAM, _execute_gen, HookType.AROUND)
    HookRegistry.apply_hooks()
    if SEAM not in HookRegistry._patched:
        raise RuntimeError(
            f"sglang {sglang.__version__} has no usable {SEAM}, which parse_gen and "
            "parse_verify need; install sglang==0.5.23."
        )


def report_of(backend: Any, meta_info: Any) -> dict[str, Any]:
    """The report in a response. Raises ParseUnavailableError where there is none, and
    RuntimeError where the request was aborted."""
    meta_info = meta_info if isinstance(meta_info, dict) else {}
    reports = meta_info.get(KEY)
    reason = meta_info.get("finish_reason")
    if not reports and isinstance(reason, dict) and reason.get("type") == "abort":
        raise RuntimeError(f"The request was aborted: {reason.get('message')}")
    if not reports:
        raise unavailable(backend)
    report: dict[str, Any] = reports[0]
    return report


def unavailable(backend: Any) -> ParseUnavailableError:
    where = getattr(backend, "base_url", type(backend).__name__)
    return ParseUnavailableError(
        f"{where} does not serve PARSE; start it with --speculative-algorithm PARSE."
    )
