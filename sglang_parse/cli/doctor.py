"""`sglang-parse doctor`: is this machine ready to serve PARSE? One line a check."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_parse.cli.doctor_pair import Memory, kernels_sentence, memory_sentence
from sglang_parse.runtime.model_folder import context_length, problem_of

PLUGIN_GROUP, PLATFORM_GROUP = "sglang.srt.plugins", "sglang.srt.platforms"
REINSTALL = "reinstall with: pip install -e ."
MIN_FREE_GIB = 2.0  # one server of the embedded pair takes about 1.5 GiB


class Problem(Exception):
    """A failed check: what is wrong, and what to do."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    ok: bool
    text: str


def run_checks(target: str, draft: str, draft_url: str = "") -> Iterator[Finding]:
    """All checks, each as soon as it is done; a failing one does not stop the rest.

    draft_url: of a draft server, "" without one.
    """
    checks: tuple[Callable[[], str], ...] = (
        check_python,
        check_sglang,
        check_torch,
        check_package,
        check_plugins,
        check_platform,
        check_hooks,
        check_attention,
        partial(check_model, target, "--model-path"),
        partial(check_model, draft, "--speculative-draft-model-path"),
        partial(check_tokenizers, target, draft),
        partial(check_contexts, target, draft),
        partial(check_kernels, target, draft),
        partial(check_pair_memory, target, draft),
        partial(check_judge, target),
        partial(check_sampling, target),
        check_memory,
        *([partial(check_draft_server, draft_url)] if draft_url else []),
    )
    for check in checks:
        with quiet():
            try:
                finding = Finding(True, check())
            except Exception as e:  # a broken installation may raise anything
                finding = Finding(False, one_line(e))
        yield finding


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines and warnings of SGLang between ours; the findings tell."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(previous)


def one_line(error: Exception) -> str:
    """The message of an error on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (Problem, ValueError))
    return text[:400] if known else f"{type(error).__name__}: {text[:400]}"


def check_python() -> str:
    found = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        raise Problem(f"python {found}, expected 3.11 to 3.13; use one of these.")
    return f"python {found} ({sys.executable})"


def pinned_sglang() -> str:
    """The sglang version this package requires, from its own metadata."""
    for requirement in requires("sglang-parse") or ():
        if requirement.startswith("sglang=="):
            return requirement.removeprefix("sglang==").partition(";")[0].strip()
    raise Problem(f"sglang-parse does not name its sglang version; {REINSTALL}.")


def check_sglang() -> str:
    pinned, found = pinned_sglang(), version("sglang")
    if found != pinned:
        raise Problem(
            f"sglang {found}, but sglang_parse is written for {pinned}; "
            f"run: pip install sglang=={pinned}"
        )
    return f"sglang {found} (the pinned version)"


def check_torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def check_package() -> str:
    import sglang_parse

    try:
        installed = version("sglang-parse")
    except PackageNotFoundError as e:
        raise Problem(f"sglang_parse is not installed; {REINSTALL}.") from e
    if installed != sglang_parse.__version__:
        raise Problem(
            f"sglang_parse {sglang_parse.__version__} runs under the metadata of "
            f"{installed}; {REINSTALL}."
        )
    return f"sglang_parse {installed} ({Path(sglang_parse.__file__).parent})"


def check_plugins() -> str:
    """Both entry points are there, and SGLang has registered the algorithm."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ours = []
    for group in (PLUGIN_GROUP, PLATFORM_GROUP):
        found = [e for e in entry_points(group=group) if "sglang_parse" in e.value]
        if not found:
            raise Problem(f"No sglang_parse entry point in {group}; {REINSTALL}.")
        ours.append(f"{group}:{found[0].name}")
    load_plugins()
    try:
        SpeculativeAlgorithm.from_string("PARSE")
    except ValueError as e:
        chosen = os.environ.get("SGLANG_PLUGINS")
        raise Problem(
            f"SGLang has not registered PARSE (SGLANG_PLUGINS={chosen!r}); unset "
            "SGLANG_PLUGINS and SGLANG_PLATFORM, or add parse to the former."
        ) from e
    return f"plugins loaded: {', '.join(ours)}; algorithm PARSE registered"


def check_platform() -> str:
    import torch
    from sglang.srt.platforms import current_platform

    from sglang_parse.cpu.platform import ParseCpuPlatform

    name = type(current_platform).__name__
    if isinstance(current_platform, ParseCpuPlatform):
        return f"platform {name}, device cpu"
    if not torch.cuda.is_available():
        raise Problem(
            f"platform {name}, but no CUDA GPU is in sight and the CPU platform of "
            "sglang_parse is off; set SGLANG_PLATFORM=parse_cpu, or unset "
            "SGLANG_PARSE_CPU_PLATFORM, SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE."
        )
    return f"platform {name}, device {torch.cuda.get_device_name()}"


def check_hooks() -> str:
    from sglang_parse.integration import hooks

    missing = [h.target for h in hooks.missing_hooks()]
    if missing:
        raise Problem(
            f"hooks not applied: {', '.join(missing)}; install the pinned sglang, "
            f"{pinned_sglang()}."
        )
    return f"hooks: all {len(hooks.active_hooks())} applied"


def check_attention() -> str:
    from sglang.srt.platforms import current_platform

    from sglang_parse.cpu.platform import ParseCpuPlatform
    from sglang_parse.integration.defaults import GPU_ATTENTION_BACKEND
    from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND

    if isinstance(current_platform, ParseCpuPlatform):
        return f"attention backend {CPU_ATTENTION_BACKEND} (torch, on CPU)"
    import flashinfer

    return f"attention backend {GPU_ATTENTION_BACKEND} {flashinfer.__version__}"


def check_model(path: str, flag: str) -> str:
    """A local model folder is complete and sound, or the path names a hub model."""
    if told := problem_of(path, needs_tokenizer=True):
        raise Problem(f"{flag} {path!r} {told}")
    if not Path(path).exists():
        return f"{flag} {path} (a hub model, not on this disk)"
    return f"{flag} {path}"


def load_tokenizer(path: str, flag: str) -> Any:
    if told := problem_of(path, needs_weights=False, needs_tokenizer=True):
        raise Problem(f"no tokenizer, as {flag} {path!r} {told}")
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    try:
        return get_tokenizer(path)
    except Exception as e:
        raise Problem(f"{flag} {path!r} has no usable tokenizer: {one_line(e)}") from e


def check_tokenizers(target: str, draft: str) -> str:
    from sglang_parse.integration.checks import check_draft_tokenizer

    ours = load_tokenizer(target, "--model-path")
    theirs = load_tokenizer(draft, "--speculative-draft-model-path")
    agreement = check_draft_tokenizer(ours, theirs)
    if not agreement.shares_ids:
        return f"the draft drafts in text; {agreement}"
    return f"{agreement} ({len(ours.get_vocab())} tokens)"


def check_contexts(target: str, draft: str) -> str:
    """The draft reads as long a text as the target."""
    from sglang_parse.integration.start_checks import check_context

    pair = {"model_path": target, "speculative_draft_model_path": draft}
    check_context(SimpleNamespace(**pair), "")
    most = [context_length(path) for path in (target, draft)]
    if None in most:
        return "context lengths not checked: a config.json does not say them plainly"
    return f"context lengths fit: target {most[0]} tokens, draft {most[1]}"


def check_kernels(target: str, draft: str) -> str:
    """FlashInfer has the pair's kernels, or can compile them."""
    import torch

    if not torch.cuda.is_available():
        return "FlashInfer is not used on CPU and compiles nothing"
    capability, _ = torch.cuda.get_device_capability()
    return kernels_sentence((target, draft), capability)


def check_pair_memory(target: str, draft: str) -> str:
    """Weights and some KV of the pair fit."""
    import psutil
    import torch

    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        memory = Memory(total, torch.cuda.device_count())
    else:
        memory = Memory(psutil.virtual_memory().available)
    return memory_sentence(target, draft, memory, context_length(target) or 0)


def check_judge(target: str) -> str:
    from sglang_parse.judging.prompt import build_judge_prompt
    from sglang_parse.options.server import ParseConfig

    config = ParseConfig.from_sources()
    tokenizer = load_tokenizer(target, "--model-path")
    judge = build_judge_prompt(tokenizer, config.judge_suffix, config.verdict_pairs)
    verdicts = ", ".join(
        f"{yes}={ids[0]} {no}={ids[1]}"
        for (yes, no), ids in zip(config.verdict_pairs, judge.verdict_ids, strict=True)
    )
    form = "chat template" if judge.uses_chat_template else "plain text"
    text = tokenizer.decode(judge.suffix)
    return (
        f"judge: suffix of {len(judge.suffix)} tokens ({form}), verdicts {verdicts}, "
        f"suffix {text!r}"
    )


def check_sampling(target: str) -> str:
    """The model's own sampling defaults leave something to judge."""
    from transformers import GenerationConfig

    from sglang_parse.integration.checks import penalty_sentence

    try:
        defaults = GenerationConfig.from_pretrained(target).to_dict()
    except OSError:  # it has none, or it is of the hub and cannot be had
        if not Path(target).is_dir():
            return (
                f"sampling defaults not checked: no generation_config.json of {target}"
            )
        defaults = {}
    if told := penalty_sentence(defaults):
        raise Problem(told)
    return "sampling defaults of the target leave chat requests to PARSE"


def check_draft_server(url: str) -> str:
    """It lists its models, with the API key of the environment."""
    from sglang_parse.drafting.remote_protocol import described, list_models
    from sglang_parse.options.checks import DRAFT_KEY_ENV, check_url

    check_url(url, "--speculative-parse-draft-url")
    key = os.environ.get(DRAFT_KEY_ENV, "")
    try:
        models = list_models(url, key)
    except Exception as e:
        raise Problem(
            f"the draft server at {url} cannot be used ({described(e)}); start it, or "
            f"set its key in {DRAFT_KEY_ENV}."
        ) from e
    sent = "with" if key else "without"
    return f"draft server {url}, asked {sent} a key, serves {', '.join(models)}"


def check_memory() -> str:
    import psutil
    import torch

    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    where = "memory"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        where = "GPU memory"
    text = f"free {where} {free / 2**30:.1f} of {total / 2**30:.1f} GiB"
    if free / 2**30 < MIN_FREE_GIB:
        raise Problem(
            f"{text}, expected {MIN_FREE_GIB:g} GiB or more; stop other programs."
        )
    return text
