"""`sglang-parse trace`: one answer of a running server and what PARSE did for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from rich.console import Console

from sglang_parse.cli import trace_text
from sglang_parse.options.validation import shown

TIMEOUT_S = 600.0
COUNTS = (
    ("target_passes", "target passes"),
    ("draft_tokens", "tokens drafted"),
    ("eagle_draft_tokens", "tokens drafted by the head"),
    ("client_tokens", "client tokens"),
    ("judged_segments", "segments judged"),
    ("probe_segments", "of them by the probe"),
    ("kept_segments", "segments kept"),
    ("kept_tokens", "tokens kept"),
    ("matched_tokens", "of them token by token"),
    ("written_tokens", "tokens by the target"),
)


@dataclass(frozen=True)
class TraceOptions:
    """What `trace` sends to a server. custom_params: `parse_*` fields."""

    url: str
    prompt: str
    max_tokens: int = 512
    temperature: float = 0.0
    api_key: str | None = None
    custom_params: dict[str, Any] = field(default_factory=dict)


def run_trace(options: TraceOptions) -> None:
    """Send the request and draw its answer.

    Raises RuntimeError with one sentence if there is no answer or no report.
    """
    show(*ask(options), Console(soft_wrap=True))


def ask(options: TraceOptions) -> tuple[str, dict[str, Any]]:
    """The answer of one chat completion, and its report with segments."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "return_meta_info": True,
        # The report gives its segments' places in the whole output.
        "separate_reasoning": False,
        "custom_params": {**options.custom_params, "parse_report": True},
    }
    url = options.url.rstrip("/").removesuffix("/v1")
    reply = post(url + "/v1/chat/completions", body, options.api_key)
    try:
        choice = reply["choices"][0]
        answer = choice["message"].get("content") or ""
        reports = (choice.get("meta_info") or {}).get("parse")
    except (KeyError, IndexError, TypeError, AttributeError) as e:
        raise RuntimeError(f"{url} sent no chat completion: {shown(reply)}") from e
    if not reports:
        raise RuntimeError(
            f"{options.url} does not serve PARSE; start the server with "
            "--speculative-algorithm PARSE and this plugin installed."
        )
    return answer, reports[0]


def post(url: str, body: Mapping[str, Any], api_key: str | None = None) -> Any:
    """The JSON reply. Raises RuntimeError with one sentence."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = requests.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
        if reply.ok:
            return reply.json()
    except (requests.RequestException, ValueError) as e:
        raise RuntimeError(
            f"{url} does not answer ({type(e).__name__}); give the address of a "
            "running server, such as http://127.0.0.1:30000, with --url."
        ) from e
    raise RuntimeError(f"{url} answered {reply.status_code}: {_reason(reply.content)}")


def _reason(body: bytes) -> str:
    """The message in an error body of SGLang, or the start of another one."""
    text = body.decode("utf-8", "replace").strip()
    try:
        data = json.loads(text)
        text = str((data.get("error") or data).get("message") or text)
    except (ValueError, AttributeError):
        pass
    return trace_text.printable(" ".join(text[:300].split()))


def show(answer: str, report: Mapping[str, Any], console: Console) -> None:
    """Print the answer with its segments, a legend and the counts."""
    marks = console.color_system is None
    spans = trace_text.answer_spans(answer, report)
    console.print(trace_text.draw_answer(spans, marks=marks))
    has_client = bool(report.get("client_tokens"))
    console.print(trace_text.legend(marks=marks, has_client=has_client))
    console.print(trace_text.printable(summary(report)), highlight=False)


def summary(report: Mapping[str, Any]) -> str:
    """The mode and the counts that are not zero."""
    counts = [f"{report[key]} {name}" for key, name in COUNTS if report.get(key)]
    kept = report.get("kept_by", {})
    counts += [
        f"{kept.get(name, 0)} of {num} kept by {name}"
        for name, num in report.get("drafted_by", {}).items()
    ]
    mode = f"mode {report.get('mode')}"
    if report.get("fallback"):
        mode += f" because of {report['fallback']}"
    told = ", ".join([mode, *counts]) + "."
    if unjudged := report.get("not_judged"):
        told += f" {unjudged['rounds']} rounds not judged: {unjudged['reason']}."
    return told
