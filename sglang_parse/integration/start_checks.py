"""What is checked before a server loads a model: folders, device, port.

Each failed check ends the start with one sentence that names the flag.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from types import TracebackType
from typing import Any

from sglang_parse.integration.flags import attach_options, config_from_server_args
from sglang_parse.options.table import flag_name
from sglang_parse.probe.open_probe import check_probe_flags
from sglang_parse.runtime.model_folder import context_length, problem_of
from sglang_parse.runtime.names import is_parse

# Values of an environment variable that leave a switch off.
OFF = ("", "0", "false", "False")


class StartError(ValueError):
    """A setting of the user's that no server can start with; one sentence."""


def attach_and_check(result: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook on ServerArgs.from_cli_args(args): keep our flags on the record, and
    check a PARSE server's start."""
    result = attach_options(result, *args, **kwargs)
    if is_parse(getattr(result, "speculative_algorithm", None)):
        begin(result)
    return result


def begin(server_args: Any) -> None:
    """What a command line is checked for before SGLang resolves it.

    From here on a StartError ends the program without a traceback. Raises StartError.
    """
    show_in_one_line()
    try:
        config = config_from_server_args(server_args)
        config.check_draft_model(server_args.speculative_draft_model_path)
        check_start(server_args, config.eagle_model_path)
        check_probe_flags(server_args, config)
    except ValueError as e:
        raise StartError(str(e)) from e


def validate(server_args: Any) -> None:
    """What SGLang's resolution asks a registered algorithm. Raises StartError."""
    from sglang_parse.integration.refusals import validate_server_args

    try:
        config = config_from_server_args(server_args)
        config.check_draft_model(server_args.speculative_draft_model_path)
        check_start(server_args, config.eagle_model_path)
        check_probe_flags(server_args, config)
        validate_server_args(server_args)
    except ValueError as e:
        raise StartError(str(e)) from e


def check_start(server_args: Any, head_path: str) -> None:
    """Folders and device, from the arguments alone. Raises StartError.

    head_path: the EAGLE-3 head's, "" without one.
    """
    check_folders(server_args, head_path)
    check_context(server_args, head_path)
    check_device(server_args)


def check_folders(server_args: Any, head_path: str) -> None:
    """Every model folder is complete. Raises StartError naming the flag and folder."""
    needs_weights = getattr(server_args, "load_format", "auto") != "dummy"
    for flag, path, needs_tokenizer in (
        ("--model-path", server_args.model_path, False),
        (
            "--speculative-draft-model-path",
            server_args.speculative_draft_model_path,
            True,
        ),
        (flag_name("eagle_model_path"), head_path or None, False),
    ):
        if path is None:
            continue
        told = problem_of(
            path, needs_weights=needs_weights, needs_tokenizer=needs_tokenizer
        )
        if told:
            raise StartError(f"{flag} {path!r} {told}")


def check_context(server_args: Any, head_path: str) -> None:
    """Who drafts can read as long a text as the target. Raises StartError naming the
    flag to set; SGLang would stop while it loads the second model."""
    if os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0") not in OFF:
        return
    asked = getattr(server_args, "context_length", None)
    longest = asked or context_length(server_args.model_path)
    for flag, path in (
        ("--speculative-draft-model-path", server_args.speculative_draft_model_path),
        (flag_name("eagle_model_path"), head_path),
    ):
        most = context_length(path) if path else None
        if longest and most and most < longest:
            raise StartError(
                f"{flag} {path!r} reads {most} tokens and the target {longest}; set "
                f"--context-length {most} or less."
            )


def check_device(server_args: Any) -> None:
    """A GPU that was asked for by name is there. Raises StartError."""
    device = str(server_args.device or "").split(":", 1)[0]
    if device != "cuda":
        return
    import torch
    from sglang.srt.platforms import current_platform

    if not torch.cuda.is_available():
        raise StartError(
            f"--device is {server_args.device!r} and no CUDA GPU is in sight; leave "
            "--device out to serve on the CPU."
        )
    if str(current_platform.get_device()).split(":", 1)[0] == "cpu":
        raise StartError(
            f"--device is {server_args.device!r} and the CPU platform is chosen; unset "
            "SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE."
        )


def check_port(server_args: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on http_server.launch_server: nobody listens on the port.

    Raises StartError. SGLang finds out once its models are loaded, and then hangs.
    """
    first_node = getattr(server_args, "node_rank", 0) == 0
    if is_parse(server_args.speculative_algorithm) and first_node:
        host = server_args.host or "127.0.0.1"
        if told := port_problem(host, server_args.port):
            raise StartError(told)


def port_problem(host: str, port: int) -> str:
    """Why no server can listen there, as one sentence, or ""."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        # As HTTP servers do: a connection of an earlier server may linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return (
                    f"--port is {port} and another program listens there on {host}; "
                    "choose another --port."
                )
            return f"--host {host} --port {port} cannot be used: {e.strerror}."
        except OverflowError:
            return f"--port is {port}; expected 0 to 65535."
    return ""


def show_in_one_line() -> None:
    """Have a StartError that ends this program told without its traceback."""
    usual = sys.excepthook
    if getattr(usual, "shows_start_errors", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StartError):
            sys.stderr.write(f"{error}\n")
        else:
            usual(kind, error, trace)

    hook.shows_start_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook
