"""The subcommands `calibrate` and `report` of the console script."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang_parse.cli.common import check_writable
from sglang_parse.options.validation import check_count

SWEPT = ("thresholds", "segmenters")


def add_calibrate(commands: Any) -> None:
    """Define it on the parser's subcommands."""
    tune = commands.add_parser(
        "calibrate", help="find the fastest setting within an accuracy budget"
    )
    add_questions(tune, problems=700, out="JSON to write")
    tune.add_argument(
        "--screen",
        type=int,
        default=100,
        help="that order settings first; default: 100",
    )
    tune.add_argument(
        "--budget", type=float, default=0.5, help="points of accuracy; default: 0.5"
    )
    tune.add_argument("--confidence", type=float, default=0.95, help="default: 0.95")
    tune.add_argument(
        "--thresholds", type=float, nargs="+", metavar="X", help="default: 0.3 to 0.97"
    )
    tune.add_argument(
        "--segmenters",
        nargs="+",
        metavar="NAME",
        help="default: step paragraph fixed:32",
    )
    tune.set_defaults(command=calibrate_command)
    report = commands.add_parser(
        "report", help="write one HTML page on a server's speed and answers"
    )
    add_questions(report, problems=200, out="HTML to write")
    report.add_argument(
        "--target-url",
        default="",
        metavar="URL",
        help="of a server of the target alone; default: the same server, with "
        "parse_mode off",
    )
    report.add_argument(
        "--margin",
        type=float,
        default=1.0,
        help="points of accuracy within which answers are as good; default: 1",
    )
    report.set_defaults(command=report_command)


def add_questions(parser: argparse.ArgumentParser, *, problems: int, out: str) -> None:
    """What both send to a server, and the file that they write."""
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=out)
    parser.add_argument(
        "--prompts",
        default="",
        metavar="FILE",
        help="lines of JSON with `prompt` (or `question`) and perhaps `answer`; "
        "without answers, the target's own are the reference; default: problems of "
        "the embedded pair",
    )
    parser.add_argument(
        "--problems", type=int, default=problems, help=f"default: {problems}"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="default: 8")
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--chat-template-json",
        dest="chat_template",
        type=json_object,
        metavar="JSON",
        help='options of the chat template, as {"enable_thinking": false}',
    )


def calibrate_command(args: argparse.Namespace) -> int:
    from sglang_parse.calibrate.calibrate_options import CalibrateOptions
    from sglang_parse.calibrate.calibration import run_calibration

    values = {k: v for k, v in vars(args).items() if v is not None and k != "command"}
    for name in SWEPT:
        if name in values:
            values[name] = tuple(values[name])
    options = CalibrateOptions(**values | {"url": args.url.rstrip("/")})
    check_writable(args.out, "--out")
    print(run_calibration(options))
    return 0


def report_command(args: argparse.Namespace) -> int:
    from sglang_parse.cli.pair_report import run_report

    for name in ("problems", "concurrency"):
        check_count(getattr(args, name), f"--{name}", 1, 1 << 20)
    args.url, args.target_url = args.url.rstrip("/"), args.target_url.rstrip("/")
    check_writable(args.out, "--out")
    args.out.write_text(run_report(args), encoding="utf-8")
    return 0


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
