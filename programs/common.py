"""What every program here needs: a server, a question, and errors that are seen."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import sglang as sgl
from sglang.lang.chat_template import get_chat_template

from programs.server_template import server_template
from sglang_parse.embedded.task import Problem, make_problems

SEED = 37  # of the embedded task's held-out problems


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Options of all programs."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="PARSE server")
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        help="of SGLang's chat templates; the server is asked without it",
    )
    parser.add_argument("--question", help="default: a problem of the embedded task")
    parser.add_argument(
        "--problem", type=int, default=0, metavar="K", help="which one; default: 0"
    )
    return parser


def text_file(name: str) -> str:
    """The text of a file, for argparse."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise argparse.ArgumentTypeError(f"{name!r} is not readable ({e}).") from e


def connect(args: argparse.Namespace) -> sgl.RuntimeEndpoint:
    """The server as a backend. Exits with one sentence if nothing answers."""
    try:
        backend = sgl.RuntimeEndpoint(args.url)
    except (OSError, RuntimeError, ValueError) as e:
        raise SystemExit(f"{args.url} does not answer ({e}); see --url.") from e
    if args.chat_template is not None:
        backend.chat_template = get_chat_template(args.chat_template)
        return backend
    try:
        backend.chat_template = server_template(args.url)
    except (OSError, ValueError, KeyError) as e:
        raise SystemExit(
            f"{args.url} does not tell its chat template ({e}); name one with "
            "--chat-template."
        ) from e
    return backend


def embedded_problem(args: argparse.Namespace) -> Problem:
    """The problem that stands in for --question."""
    return make_problems(args.problem + 1, SEED)[-1]


def report(state: Any, name: str) -> dict[str, Any]:
    """PARSE's report of one call; waits for it."""
    meta_info = state.get_meta_info(name)
    if meta_info is None:
        executor = state.stream_executor
        executor.worker.join(10)  # the error is noted a moment after the event
        raise executor.error_ or RuntimeError(f"{name} got no answer.")
    result: dict[str, Any] = meta_info["parse"][0]
    return result


def is_valid(state: Any, name: str) -> bool:
    """Whether the judge kept the whole text. Not whether it is what was sent: a
    tokenizer may write it otherwise."""
    judged = report(state, name)
    return bool(judged["cut"]["segments"] == len(judged["segments"]))


def text(state: Any, name: str) -> str:
    """What one call gave the state; waits for it, raises if it failed."""
    report(state, name)
    return str(state[name])
