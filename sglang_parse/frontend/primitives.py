"""`parse_gen` and `parse_verify`, shaped like the calls in sglang/lang/api.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sglang as sgl
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglGen, SglSamplingParams, SglSelect
from sglang.lang.tracer import TracingScope

from sglang_parse.frontend import adapter
from sglang_parse.frontend.adapter import Answer, ParseExpr, ParseSamplingParams
from sglang_parse.options.request import REQUEST_TABLE, check_custom_params

adapter.install()

# Keywords of each call and the request fields that they set, from the table of options.
# The signatures repeat the keywords for editors; a test compares the two.
GEN_KEYWORDS = {row.keyword: row.request_field for row in REQUEST_TABLE if row.keyword}
VERIFY_KEYWORDS = {
    "text": "parse_verify",
    **{row.keyword: row.request_field for row in REQUEST_TABLE if row.judges},
}


def parse_gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *gen_args: Any,
    threshold: float | None = None,
    segment: str | None = None,
    mode: str | None = None,
    draft: str | None = None,
    keep_rule: str | None = None,
    judge_every: int | None = None,
    window: int | None = None,
    judge_suffix: str | None = None,
    exact_tail: bool | None = None,
    exact_head: int | None = None,
    recover_segments: int | str | None = None,
    compose: bool | None = None,
    judge: str | None = None,
    report: bool = True,
    **gen_kwargs: Any,
) -> SglGen | SglSelect:
    """`sgl.gen` on a PARSE server; takes all its arguments, and these:

    threshold, segment, mode, keep_rule, judge_every, window, judge_suffix,
        exact_tail, exact_head, recover_segments, compose, judge: this call's own
        `parse_*` settings (segment: the segmenter); None for the server's.
    draft: text taken as the draft of the answer from its first token. Its prefixes are
        judged in one pass, the valid one is kept, and generation goes on from there.
    report: list the segments in `state.get_meta_info(name)["parse"][0]`.

    A setting that is looser than the server's, such as a lower threshold, needs a
    server with `--speculative-parse-client-options all`; others refuse the request.

    Raises ValueError on a wrong setting. While the program runs, an answer of a server
    without PARSE is a ParseUnavailableError (`state.error()`).
    """
    options = _custom_params("parse_gen", GEN_KEYWORDS, locals())
    lists_segments = options.pop("parse_report", False)
    gen = sgl.gen(name, max_tokens, *gen_args, **gen_kwargs)
    if isinstance(gen, SglSelect):
        if options:
            raise ValueError(
                f"parse_gen has choices and {', '.join(options)}; choices are scored, "
                "not generated, so leave PARSE's arguments out."
            )
        return gen
    return ParseGen(gen, {**options, "parse_report": lists_segments})


def parse_verify(
    name: str,
    text: str | Sequence[str],
    *,
    threshold: float | None = None,
    segment: str | None = None,
    keep_rule: str | None = None,
    judge_suffix: str | None = None,
) -> SglGen:
    """Judge every prefix of `text` in one pass of the target, generating nothing.

    The valid prefix becomes part of the prompt and `state[name]`.
    `state.get_meta_info(name)["parse"][0]` has `segments`, `scores` (one per segment)
    and `cut`: how many `segments`, `tokens` and `chars` of the text are valid.

    text: cut by the segmenter; a list names the segments itself. Other arguments as in
    `parse_gen`.
    """
    if isinstance(text, (list, tuple)):
        text = list(text)
    options = _custom_params("parse_verify", VERIFY_KEYWORDS, locals())
    gen = sgl.gen(name, 1, temperature=0.0)
    return ParseVerify(gen, options)


def _custom_params(
    primitive: str, keywords: Mapping[str, str], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """A call's options as request fields, where given, checked as the server would.

    keywords: keyword to request field. Under SGLang's tracer a program's arguments are
    expressions, and nothing is run.
    """
    given = {
        field: arguments[keyword]
        for keyword, field in keywords.items()
        if arguments[keyword] is not None
    }
    if TracingScope.get_current_scope() is None:
        try:
            check_custom_params(given)
        except ValueError as e:
            raise ValueError(f"{primitive}: {e}") from e
    return given


class ParseGen(ParseExpr):
    """One request with custom_params."""

    def generate(
        self, backend: Any, executor: StreamExecutor, params: SglSamplingParams
    ) -> Answer:
        ours = ParseSamplingParams.of(params, self.custom_params)
        text, meta_info = backend.generate(executor, sampling_params=ours)
        adapter.report_of(backend, meta_info)
        return text, meta_info

    def generate_stream(
        self, backend: Any, executor: StreamExecutor, params: SglSamplingParams
    ) -> Iterator[Answer]:
        ours = ParseSamplingParams.of(params, self.custom_params)
        meta_info: dict[str, Any] = {}
        for text, meta_info in backend.generate_stream(executor, sampling_params=ours):
            yield text, meta_info
        adapter.report_of(backend, meta_info)


class ParseVerify(ParseExpr):
    """One request that generates nothing; its text is the valid prefix."""

    def generate(
        self, backend: Any, executor: StreamExecutor, params: SglSamplingParams
    ) -> Answer:
        # The program's own defaults concern what it generates.
        plain = SglSamplingParams(max_new_tokens=1, temperature=0.0, stop=[])
        ours = ParseSamplingParams.of(plain, self.custom_params)
        _, meta_info = backend.generate(executor, sampling_params=ours)
        report = adapter.report_of(backend, meta_info)
        return add_cut(report), meta_info


def add_cut(report: dict[str, Any]) -> str:
    """Add `scores` and `cut` to a report of judged segments; returns the kept text."""
    segments = report["segments"]
    kept = [s for s in segments if s["outcome"] == "kept"]
    text = "".join(s["text"] for s in kept)
    report["scores"] = [s["score"] for s in segments]
    report["cut"] = {
        "segments": len(kept),
        "tokens": sum(len(s["token_ids"]) for s in kept),
        "chars": len(text),
    }
    return text
