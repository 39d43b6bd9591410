"""`sglang-parse doctor`: is this machine ready to serve a pair? One line a check.

The checks of a pair are those of a server's start: the command line is resolved as
SGLang's launcher resolves it, with the plugin loaded. Weights are read for `--prove`
alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

REINSTALL = "reinstall with: pip install -e ."


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    ok: bool
    text: str


def run_checks(target: str, draft: str) -> Iterator[Finding]:
    """All checks, each as soon as it is done; a failed one does not stop the others."""
    for check in (check_versions, check_plugin, check_platform, check_hooks):
        yield run(check)
    started: list[Any] = []
    yield run(partial(check_start, target, draft, started))
    for args in started:  # a pair that cannot start has one line, which names the flag
        for of_pair in (check_tokenizers, check_judge):
            yield run(partial(of_pair, args))


def prove_paths(target: str, draft: str) -> Iterator[Finding]:
    """Each fast path of a server of the pair, as the server finds it when it starts. It
    loads the weights and captures what it would serve by."""
    from sglang_parse.demo.servers import ServerError, ServerProcess

    flags = ["--model-path", target, "--speculative-draft-model-path", draft]
    flags += ["--speculative-algorithm", "PARSE", "--speculative-parse-prove", "full"]
    flags += ["--skip-server-warmup"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            process = ServerProcess(flags, "proof", Path(folder) / "server.log")
            process.grace_s = 0.0  # it serves nobody
            with process as server:
                reply = urllib.request.urlopen(f"{server.url}/server_info", timeout=60)
                (state, *_) = json.load(reply)["internal_states"]
    except ServerError as error:
        yield Finding(False, str(error))
        return
    for name, path in state["parse"]["paths"].items():
        why = f", {path['why']}" if path["why"] else ""
        yield Finding(path["state"] != "off", f"{name} is {path['state']}{why}")


def run(check: Callable[[], str]) -> Finding:
    """What a check found. Log lines and warnings of SGLang are not shown."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            return Finding(True, check())
    except Exception as e:  # a broken installation may raise anything
        return Finding(False, one_line(e))
    finally:
        logging.disable(previous)


def one_line(error: Exception) -> str:
    """The message of an error on one line; one that no check wrote has its type."""
    text = " ".join(str(error).split())[:400]
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}"


def check_versions() -> str:
    """SGLang is the version that the package's metadata requires."""
    import sglang_parse

    ours, sglang = version("sglang-parse"), version("sglang")
    if f"sglang=={sglang}" not in (requires("sglang-parse") or ()):
        raise ValueError(f"sglang {sglang} is not the version required; {REINSTALL}.")
    if ours != sglang_parse.__version__:
        raise ValueError(
            f"sglang_parse {sglang_parse.__version__} runs under the metadata of "
            f"{ours}; {REINSTALL}."
        )
    return f"{sys.executable}, sglang {sglang}, sglang_parse {ours}"


def check_plugin() -> str:
    """SGLang has loaded the plugin, which registers the algorithm."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    try:
        SpeculativeAlgorithm.from_string("PARSE")
    except ValueError as e:
        chosen = os.environ.get("SGLANG_PLUGINS")
        raise ValueError(
            f"SGLang has not registered PARSE (SGLANG_PLUGINS={chosen!r}); unset "
            f"SGLANG_PLUGINS and SGLANG_PLATFORM, or {REINSTALL}."
        ) from e
    return "the plugin is loaded, and the algorithm PARSE is registered"


def check_platform() -> str:
    import torch
    from sglang.srt.platforms import current_platform

    from sglang_parse.cpu.platform import ParseCpuPlatform

    name = type(current_platform).__name__
    if isinstance(current_platform, ParseCpuPlatform):
        return f"platform {name}, device cpu"
    if not torch.cuda.is_available():
        raise ValueError(
            f"platform {name}, but torch finds no CUDA GPU and the CPU platform of "
            "sglang_parse is off; unset SGLANG_PARSE_CPU_PLATFORM, SGLANG_PLATFORM "
            "and SGLANG_USE_CPU_ENGINE."
        )
    return f"platform {name}, device {torch.cuda.get_device_name()}"


def check_hooks() -> str:
    from sglang_parse.plugin import hooks

    hooks.check_hooks()
    return f"all {len(hooks.active_hooks())} hooks are applied"


def check_start(target: str, draft: str, started: list[Any]) -> str:
    """What a server of the pair checks before it loads weights.

    started: gets the resolved arguments of the server.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolving_view
    from sglang.srt.server_args import prepare_server_args

    from sglang_parse.plugin.start_checks import CHECKS

    argv = ["--model-path", target, "--speculative-algorithm", "PARSE"]
    args = prepare_server_args([*argv, "--speculative-draft-model-path", draft])
    args.resolve_once()
    started.append(resolving_view(args))
    prefill, _ = attention_backends_of(started[0])
    checks = ", ".join(check.name for check in CHECKS)
    return f"{target} with {draft} passes {checks}; attention: {prefill}"


def check_tokenizers(args: Any) -> str:
    from sglang_parse.drafting.vocabularies import match_of

    agreement = match_of(args)
    how = "as token ids" if agreement.shares_ids else "as text"
    return f"drafts reach the target {how}: {agreement}"


def check_judge(args: Any) -> str:
    from sglang_parse.judging.prompt import build_judge_prompt
    from sglang_parse.plugin.flags import config_from_server_args
    from sglang_parse.sgl.tokenizers import load_tokenizer

    config = config_from_server_args(args)
    tokenizer = load_tokenizer(args, of_draft=False)
    judge = build_judge_prompt(tokenizer, config.judge_suffix, config.verdict_pairs)
    pairs = zip(config.verdict_pairs, judge.verdict_ids, strict=True)
    verdicts = ", ".join(f"{y}={ids[0]} {n}={ids[1]}" for (y, n), ids in pairs)
    text = tokenizer.decode(judge.suffix)
    return f"judge suffix of {len(judge.suffix)} tokens, verdicts {verdicts}: {text!r}"
