"""The YAML file of a benchmark as checked records."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.arms import ARMS, Arm, Models, model_path
from benchmarks.harness.datasets import DATA_SETS
from sglang_parse.demo.load import REQUEST_TIMEOUT_S
from sglang_parse.demo.servers import DEFAULT_TIMEOUT_S
from sglang_parse.options.request import check_custom_params
from sglang_parse.options.table import DEFAULT_JUDGE_SUFFIX
from sglang_parse.options.validation import (
    check_count,
    check_number,
    check_text,
    shown,
)

# Flags that no arm has for itself, and the field of the file that gives them to all.
FILES_OWN = {
    "--max-running-requests": "server_args",
    "--speculative-parse-threshold": "threshold",
    "--speculative-parse-judge-suffix": "judge_suffix",
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSetSpec:
    """One data set of a run. problems: how many, 0 for all. path: a local file in the
    published schema instead of the hub. max_new_tokens: 0 for the set's own limit."""

    name: str
    problems: int = 0
    path: str = ""
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if self.name not in DATA_SETS:
            raise ValueError(
                f"datasets: {shown(self.name)} is unknown; expected one of "
                f"{', '.join(DATA_SETS)}."
            )
        check_count(self.problems, f"datasets.{self.name}.problems", 0, 1 << 20)
        check_count(
            self.max_new_tokens, f"datasets.{self.name}.max_new_tokens", 0, 1 << 20
        )


@dataclass(frozen=True)
class SweepSpec:
    """Per-request options tried on the fresh server of one arm, combination by
    combination; every mapping of `grid` is a product of its lists."""

    arm: str
    dataset: DataSetSpec
    concurrency: int
    grid: tuple[Mapping[str, Sequence[Any]], ...]

    def combinations(self) -> list[dict[str, Any]]:
        """The options of every cell, without repetitions, in the order given."""
        found: list[dict[str, Any]] = []
        for axes in self.grid:
            for values in itertools.product(*axes.values()):
                options = dict(zip(axes, values, strict=True))
                if options not in found:
                    found.append(options)
        return found


@dataclass(frozen=True)
class BenchConfig:
    """What to measure; docs in benchmarks/README.md.

    server_args: flags of every server of every arm. model_cpus: cores shared by the
    processes that run the models of an arm, however many servers it has; () leaves
    them alone. repeats: whole runs one after the other, each on fresh servers.
    boot_together: arms whose servers start side by side; never two are measured at
    once, and models alone are served once for all of them. laps: parts that a cell is
    measured in, in turns with the same cell of the other arms whose servers are up,
    among which the arm `target` then always is.
    step_stop: ends a step of the sequential arm. judge: OpenAI-compatible endpoint
    {url, model} that rates open answers. boot_timeout_s: for a server to be ready,
    downloads included. request_timeout_s: for one answer.
    """

    out: Path
    models: Models
    arms: tuple[Arm, ...]
    datasets: tuple[DataSetSpec, ...]
    concurrency: tuple[int, ...] = (1,)
    repeats: int = 1
    seed: int = 64
    warm_up: int = 8
    server_args: tuple[str, ...] = ()
    model_cpus: tuple[int, ...] = ()
    boot_together: int = 1
    laps: int = 1
    temperature: float = 0.0
    threshold: float = 0.5
    judge_suffix: str = DEFAULT_JUDGE_SUFFIX
    step_stop: str = "\n\n"
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    sweep: SweepSpec | None = None
    judge: Mapping[str, str] = field(default_factory=dict)
    boot_timeout_s: float = DEFAULT_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("repeats", "warm_up", "boot_together", "laps"):
            check_count(getattr(self, name), name, 1, 1000)
        for concurrency in self.concurrency:
            check_count(concurrency, "concurrency", 1, 4096)
        check_number(self.threshold, "threshold", 0.0, 2.0)
        check_number(self.temperature, "temperature", 0.0, 10.0)
        check_text(self.judge_suffix, "judge_suffix")
        if not self.step_stop or not isinstance(self.step_stop, str):
            raise ValueError(
                f"step_stop is {shown(self.step_stop)}; expected the text that ends a "
                'step, such as "\\n\\n".'
            )
        flags = [flag.partition("=")[0] for flag in self.server_args]
        if "--max-running-requests" not in flags:
            raise ValueError(
                "server_args lacks --max-running-requests; SGLang chooses it by the "
                "algorithm, so arms would differ: set it for all."
            )
        if self.judge and not (self.judge.get("url") and self.judge.get("model")):
            raise ValueError("judge lacks url or model, which rate open answers.")
        for name in ("boot_timeout_s", "request_timeout_s"):
            check_number(getattr(self, name), name, 1.0, 1e6)
        sets = [spec.name for spec in self.datasets]
        for what, values in (("datasets", sets), ("concurrency", self.concurrency)):
            if len(set(values)) < len(values):
                raise ValueError(
                    f"{what}: {list(values)} names one twice; its results would lie in "
                    "one file. Measure them with another --out."
                )
        for arm in self.arms:
            check_custom_params(arm.options)
            for concurrency in arm.concurrency:
                check_count(concurrency, f"arms.{arm.name}.concurrency", 1, 4096)
        for options in self.sweep.combinations() if self.sweep else ():
            check_custom_params(options)
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"arms: {names} name one arm twice; give each its name.")
        sweepable = [arm.name for arm in self.arms if arm.takes_options]
        if self.sweep and self.sweep.arm not in sweepable:
            raise ValueError(
                f"sweep.arm is {shown(self.sweep.arm)}; expected one of `arms` whose "
                f"requests take options: {', '.join(sweepable)}."
            )

    @property
    def rater(self) -> str:
        """The model that rates open answers, "" without one."""
        names = (self.judge.get("url"), self.judge.get("model"))
        return " ".join(filter(None, names))

    @property
    def judging_flags(self) -> tuple[str, ...]:
        """Of every server that judges; a client that judges asks the same."""
        return (
            *("--speculative-parse-threshold", str(self.threshold)),
            *("--speculative-parse-judge-suffix", self.judge_suffix),
        )


def load_config(
    path: Path, out: Path | None = None, repeats: int | None = None
) -> BenchConfig:
    """Read a YAML file. out, repeats: instead of the file's own.

    Raises ValueError with one sentence that names the file and the field.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        reason = " ".join(str(e).split())
        raise ValueError(f"{str(path)!r} is not a readable YAML file: {reason}") from e
    try:
        config = read_config(raw)
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path}: {e}") from e
    if repeats is not None:
        config = dataclasses.replace(config, repeats=repeats)
    return dataclasses.replace(config, out=out) if out else config


def read_config(raw: Any) -> BenchConfig:
    """The mapping of a YAML file as a BenchConfig. Raises ValueError, TypeError."""
    known = [f.name for f in dataclasses.fields(BenchConfig) if f.name != "models"]
    known += ["target", "draft", "eagle"]
    values = dict(_mapping(raw, "the file", known))
    for name in ("out", "target", "draft", "arms", "datasets"):
        if not values.get(name):
            raise ValueError(f"{name} is missing; see benchmarks/README.md.")
    paths = (values.pop(n, None) for n in ("target", "draft", "eagle"))
    models = Models(*(str(path or "") for path in paths))
    values["out"] = Path(values["out"])
    values["arms"] = tuple(filter(None, map(_arm, _list(values["arms"], "arms"))))
    values["datasets"] = tuple(map(_dataset, _list(values["datasets"], "datasets")))
    for name in ("concurrency", "server_args", "model_cpus"):
        if name in values:
            values[name] = tuple(_list(values[name], name))
    values["server_args"] = tuple(map(str, values.get("server_args", ())))
    _mapping(values.get("chat_template", {}), "chat_template")
    _mapping(values.get("judge", {}), "judge", ("url", "model", "api_key"))
    if values.get("sweep") is not None:
        values["sweep"] = _sweep(values["sweep"])
    return BenchConfig(models=models, **values)


def _mapping(
    raw: Any, what: str, known: Sequence[str] | None = None
) -> Mapping[str, Any]:
    """known: the keys it may have, None for any."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{what} is {shown(raw)}; expected a mapping.")
    unknown = sorted(str(key) for key in raw if known and key not in known)
    if known and unknown:
        raise ValueError(
            f"{what} has unknown keys {unknown}; expected keys among "
            f"{', '.join(known)}."
        )
    return raw


def _list(raw: Any, what: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError(f"{what} is {shown(raw)}; expected a list.")
    return raw


def _arm(raw: Any) -> Arm | None:
    """A built-in arm by name, or one `like` it with changes; None if its optional
    draft is missing."""
    if isinstance(raw, str | bool):
        raw = {"name": raw}
    keys = ("name", "like", "options", "server_args", "draft", "optional", "about")
    values = dict(_mapping(raw, "an arm", (*keys, "concurrency")))
    for key in ("name", "like"):
        if values.get(key) is False:  # what YAML makes of a bare off
            values[key] = "off"
    like = values.pop("like", values.get("name"))
    if like not in ARMS:
        raise ValueError(
            f"arms: {shown(like)} is unknown; expected one of {', '.join(ARMS)}, or "
            "{name: ..., like: one of them}."
        )
    base = ARMS[like]
    name = values["name"] = values.get("name", like)
    options = _mapping(values.get("options") or {}, f"arms.{name}.options")
    extra = _list(values.get("server_args") or [], f"arms.{name}.server_args")
    if extra and not base.takes_server_args:
        raise ValueError(
            f"arms.{name}.server_args: no server of an arm like {like!r} speculates; "
            "give flags of all servers as `server_args` of the file."
        )
    flags = [str(flag).partition("=")[0] for flag in extra]
    for flag in FILES_OWN:
        if flag in flags:
            raise ValueError(
                f"arms.{name}.server_args holds {flag}; arms share it: give it as "
                f"`{FILES_OWN[flag]}` of the file."
            )
    if options and not base.takes_options:
        raise ValueError(
            f"arms.{name}.options: requests of an arm like {like!r} take none of "
            "PARSE's options."
        )
    if values.get("draft") and not base.takes_draft:
        raise ValueError(
            f"arms.{name}.draft: an arm like {like!r} loads no draft model."
        )
    if values.get("optional") and not values.get("draft"):
        raise ValueError(
            f"arms.{name}.optional: the arm names no `draft` that may be missing."
        )
    values["options"] = {**base.options, **options}
    values["server_args"] = (*base.server_args, *map(str, extra))
    values["concurrency"] = tuple(
        _list(values.get("concurrency", []), f"arms.{name}.concurrency")
    )
    arm = dataclasses.replace(base, **values)
    if arm.optional and not Path(model_path(arm.draft)).is_dir():
        logger.warning("Arm %s is left out: no folder %s.", arm.name, arm.draft)
        return None
    return arm


def _dataset(raw: Any) -> DataSetSpec:
    if isinstance(raw, str):
        raw = {"name": raw}
    keys = [f.name for f in dataclasses.fields(DataSetSpec)]
    return DataSetSpec(**_mapping(raw, "a data set", keys))


def _sweep(raw: Any) -> SweepSpec:
    keys = [f.name for f in dataclasses.fields(SweepSpec)]
    values = dict(_mapping(raw, "sweep", keys))
    grid = []
    for axes in _list(values.get("grid"), "sweep.grid"):
        items = _mapping(axes, "an entry of sweep.grid").items()
        grid.append({key: _list(v, f"sweep.grid.{key}") for key, v in items})
    return SweepSpec(
        arm=str(values.get("arm", "parse")),
        dataset=_dataset(values.get("dataset")),
        concurrency=check_count(
            values.get("concurrency"), "sweep.concurrency", 1, 4096
        ),
        grid=tuple(grid),
    )
