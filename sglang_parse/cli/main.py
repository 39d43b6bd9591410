"""The console script `sglang-parse`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from sglang_parse import __version__
from sglang_parse.cli.calibrate_command import add_calibrate
from sglang_parse.cli.common import check_writable, leave_by_exception
from sglang_parse.cli.estimate import add_estimate
from sglang_parse.cpu.entry import SWITCH_ENV
from sglang_parse.embedded import (
    DRAFT_HEAD_PATH,
    DRAFT_PATH,
    HEAD_PATH,
    QUESTION,
    TARGET_PATH,
)
from sglang_parse.options.table import EAGLE3
from sglang_parse.options.validation import suggest_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    os.environ.setdefault(SWITCH_ENV, "1")  # our commands serve on any machine
    args = build_parser().parse_args(argv)
    try:
        status: int = args.command(args)
    except KeyboardInterrupt:
        print(
            "sglang-parse: interrupted; servers that it had started are stopped.",
            file=sys.stderr,
        )
        return 130
    except (RuntimeError, ValueError, OSError) as e:
        print(f"sglang-parse: {e}", file=sys.stderr)
        return 1
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-parse", description="PARSE for SGLang: demo, traces and diagnosis."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="measure PARSE against the target alone on real servers"
    )
    demo.add_argument(
        "--problems", type=count, default=64, metavar="N", help="default: 64"
    )
    demo.add_argument(
        "--concurrency",
        type=count,
        nargs="+",
        default=[1, 8],
        metavar="C",
        help="requests in flight; default: 1 8",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    demo.add_argument(
        "--compose",
        choices=("none", EAGLE3),
        default="none",
        help="eagle3: EAGLE-3 alone and with PARSE as two more arms",
    )
    demo.add_argument(
        "--speculative-parse-eagle-model-path",
        default=str(HEAD_PATH),
        metavar="PATH",
        help="EAGLE-3 head of the target; default: the embedded one",
    )
    add_models(demo)
    demo.set_defaults(command=demo_command)

    models = commands.add_parser("models", help="print where the embedded pair lies")
    models.set_defaults(command=models_command)

    trace = commands.add_parser(
        "trace", help="ask a running server and colour the answer's segments"
    )
    trace.add_argument(
        "prompt",
        nargs="?",
        default=QUESTION,
        help="the question; - reads it from standard input; default: one that the "
        "embedded pair can answer",
    )
    trace.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    trace.add_argument(
        "--draft", type=Path, metavar="FILE", help="text to judge as the answer's draft"
    )
    trace.add_argument(
        "--max-tokens", type=count, default=512, metavar="N", help="default: 512"
    )
    trace.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    trace.add_argument("--threshold", type=float, metavar="X", help="parse_threshold")
    trace.add_argument("--mode", help="parse_mode: semantic, exact or off")
    trace.add_argument("--segmenter", metavar="NAME", help="parse_segmenter")
    trace.add_argument("--api-key", help="if the server was started with one")
    trace.set_defaults(command=trace_command)

    doctor = commands.add_parser("doctor", help="check this installation and a pair")
    add_models(doctor)
    doctor.add_argument(
        "--prove",
        action="store_true",
        help="start a server of the pair, and compare its fast paths with plain ones",
    )
    doctor.set_defaults(command=doctor_command)
    add_estimate(commands)
    add_calibrate(commands)
    flags = [*parser._option_string_actions]
    for command in commands.choices.values():
        flags += command._option_string_actions
    suggest_flags(parser, flags)
    return parser


def add_models(parser: argparse.ArgumentParser) -> None:
    """The server's own flags for the pair; the embedded one by default."""
    embedded = "default: the embedded one"
    parser.add_argument("--model-path", default=str(TARGET_PATH), help=embedded)
    parser.add_argument(
        "--speculative-draft-model-path", default=str(DRAFT_PATH), help=embedded
    )


def count(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1.")
    return int(text)


def demo_command(args: argparse.Namespace) -> int:
    from sglang_parse.cli.demo_run import DemoOptions, run_demo

    if args.json is not None:
        check_writable(args.json, "--json")
    for path, flag in (
        (args.model_path, "--model-path"),
        (args.speculative_draft_model_path, "--speculative-draft-model-path"),
        (
            args.speculative_parse_eagle_model_path,
            "--speculative-parse-eagle-model-path",
        ),
    ):
        if not Path(path).is_dir():
            raise ValueError(f"{flag} {path!r} is not a folder; give a model folder.")
    leave_by_exception()
    run_demo(
        DemoOptions(
            problems=args.problems,
            concurrency=tuple(dict.fromkeys(args.concurrency)),
            target=args.model_path,
            draft=args.speculative_draft_model_path,
            compose=args.compose,
            head=args.speculative_parse_eagle_model_path,
            json_path=args.json,
        )
    )
    return 0


def trace_command(args: argparse.Namespace) -> int:
    from sglang_parse.cli.trace import TraceOptions, run_trace

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise ValueError("The prompt is empty; give a question.")
    if prompt == QUESTION:
        print(f"{QUESTION}\n")
    options = {
        "parse_threshold": args.threshold,
        "parse_mode": args.mode,
        "parse_segmenter": args.segmenter,
        "parse_draft": args.draft and args.draft.read_text(encoding="utf-8"),
    }
    run_trace(
        TraceOptions(
            url=args.url,
            prompt=prompt,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            api_key=args.api_key,
            custom_params={k: v for k, v in options.items() if v is not None},
        )
    )
    return 0


def models_command(args: argparse.Namespace) -> int:
    paths = {"target": TARGET_PATH, "draft": DRAFT_PATH, "head": HEAD_PATH}
    paths["draft_head"] = DRAFT_HEAD_PATH
    for name, path in paths.items():
        print(f"{name} {path}")
    print(f"\nThey were trained for one kind of question alone, such as\n  {QUESTION}")
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    from sglang_parse.cli.doctor import prove_paths, run_checks

    status, pair = 0, (args.model_path, args.speculative_draft_model_path)
    for finding in chain(run_checks(*pair), prove_paths(*pair) if args.prove else ()):
        mark = "ok     " if finding.ok else "problem"
        print(f"{mark}  {finding.text}", flush=True)
        status |= not finding.ok
    return status


if __name__ == "__main__":
    sys.exit(main())
