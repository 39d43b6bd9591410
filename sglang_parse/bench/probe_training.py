"""`sglang-parse probe train`: a probe from the verdicts of a running server.

The server keeps pairs of hidden states and verdicts of the judge's question. They come
from the problems of a data set, which are asked here, or from the server's own traffic.
No text leaves the server. A probe that is worse than asked is not written.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tqdm import tqdm

from sglang_parse.bench.datasets import DATA_SETS, Item, load_items
from sglang_parse.bench.load import REQUEST_TIMEOUT_S, LoadError, load_tokenizer
from sglang_parse.bench.run import Chat
from sglang_parse.judging.probe import Learnt, Probe, Target, save_probe
from sglang_parse.judging.probe_fit import Fit, Pairs, learn
from sglang_parse.options.checks import check_choice, check_count, check_number
from sglang_parse.options.table import flag_name

PAIRS = "/parse/probe/pairs"
WAIT_S = 2.0


@dataclass(frozen=True)
class TrainOptions:
    """least_agreement: with the question, on requests held out. most_false_accepts:
    share of the prefixes that the question rejects. hidden: units of a hidden layer, 0
    for a linear probe. from_traffic: pairs to wait for, 0 to ask a data set.
    """

    url: str
    out: Path
    dataset: str = "embedded"
    path: str = ""
    problems: int = 1000
    from_traffic: int = 0
    temperatures: tuple[float, ...] = (0.0, 1.0)
    segmenters: tuple[str, ...] = ()
    concurrency: int = 8
    max_new_tokens: int = 0
    hidden: int = 0
    least_agreement: float = 0.95
    most_false_accepts: float = 0.1
    seed: int = 11
    wait_s: float = 3600.0
    api_key: str = ""
    chat_template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(self.dataset, "--dataset", tuple(DATA_SETS))
        for name in ("problems", "concurrency"):
            check_count(getattr(self, name), f"--{name}", 1, 1 << 20)
        check_count(self.hidden, "--hidden", 0, 256)
        check_count(self.from_traffic, "--from-traffic", 0, 1 << 20)
        for name in ("least_agreement", "most_false_accepts"):
            flag = "--" + name.replace("_", "-")
            check_number(getattr(self, name), flag, 0.0, 1.0)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True)
class Collected:
    """Pairs of a server, what they are bound to, and the segmenters by number."""

    pairs: Pairs
    learnt: Learnt
    layers: tuple[int, ...]
    hidden_size: int
    segmenters: tuple[str, ...]


def run_training(options: TrainOptions) -> str:
    """Collect, learn, write the probe, and return the report.

    Raises ValueError where the probe is worse than asked, where there are too few
    pairs, or where the server keeps none; LoadError where the server fails.
    """
    if options.from_traffic:
        wait_for_pairs(options)
    else:
        call(options, PAIRS, method="DELETE")
        ask_items(options)
    found = fetch_pairs(options)
    started = time.perf_counter()
    fit = learn(
        found.pairs,
        threshold=found.learnt.threshold,
        hidden=options.hidden,
        seed=options.seed,
    )
    seconds = time.perf_counter() - started
    text = report_text(found, fit, seconds)
    if told := shortfall(options, found, fit):
        raise ValueError(f"{text}\n{told}")
    save_probe(probe_of(found, fit), options.out)
    return (
        f"{text}\nWrote {options.out}; start the server with {flag_name('probe')} "
        f"{options.out}."
    )


def shortfall(options: TrainOptions, found: Collected, fit: Fit) -> str:
    """Why the probe is not written, as one sentence, or ""."""
    for kind, name in enumerate(found.segmenters):
        row = fit.report["by_kind"].get(kind)
        if kind not in fit.points or row is None:
            return f"No probe is written: there are too few pairs of {name!r}."
        if not row["agreement"] >= options.least_agreement:
            return (
                f"No probe is written: under {name!r} it agrees with the question at "
                f"{row['agreement']:.2%} of the boundaries, and --least-agreement is "
                f"{options.least_agreement:g}."
            )
        if not row["false_accepts"] <= options.most_false_accepts:
            return (
                f"No probe is written: under {name!r} it accepts "
                f"{row['false_accepts']:.2%} of what the question rejects, and "
                f"--most-false-accepts is {options.most_false_accepts:g}."
            )
    return ""


def probe_of(found: Collected, fit: Fit) -> Probe:
    """The probe with what it is bound to, and the figures of its report."""
    rows = fit.report["by_kind"]
    return Probe(
        learnt=found.learnt,
        layers=found.layers,
        hidden_size=found.hidden_size,
        points={found.segmenters[kind]: point for kind, point in fit.points.items()},
        weight=fit.weight,
        bias=fit.bias,
        inner=fit.inner,
        figures={
            "held_out_requests": fit.report["held_out_requests"],
            "learning_pairs": fit.report["learning_pairs"],
            "by_segmenter": {
                found.segmenters[kind]: {k: v for k, v in row.items() if k != "roc"}
                for kind, row in rows.items()
            },
        },
    )


# -- The server --------------------------------------------------------------------


def call(options: TrainOptions, path: str, *, method: str = "GET") -> Any:
    """A JSON answer of the server. Raises ValueError where it gives none."""
    request = urllib.request.Request(
        options.url + path, headers=options.headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        if e.code in (401, 403):
            raise ValueError(
                f"--url {options.url} refuses {path} ({e.code}); give its --api-key."
            ) from e
        raise ValueError(
            f"--url {options.url}: the server there keeps no pairs ({e.code}); start "
            f"it with {flag_name('probe_collect')} 20000."
        ) from e
    except (urllib.error.URLError, OSError, ValueError) as e:
        raise ValueError(
            f"--url {options.url}: no SGLang server answers there ({e})."
        ) from e


def wait_for_pairs(options: TrainOptions) -> None:
    """Until the traffic has brought enough. Raises ValueError after wait_s seconds."""
    end = time.monotonic() + options.wait_s
    with tqdm(total=options.from_traffic, unit="pair") as bar:
        while True:
            (one, *_) = call(options, f"{PAIRS}?start={(1 << 20)}")
            bar.n = min(one["total"], options.from_traffic)
            bar.refresh()
            if one["total"] >= options.from_traffic:
                return
            if time.monotonic() > end:
                raise ValueError(
                    f"--from-traffic {options.from_traffic}: {one['total']} pairs came "
                    f"in {options.wait_s:.0f} s; expected more traffic, or a larger "
                    f"{flag_name('probe_collect')}."
                )
            time.sleep(WAIT_S)


def fetch_pairs(options: TrainOptions) -> Collected:
    """All pairs that the server keeps, of all its data-parallel ranks."""
    states: list[torch.Tensor] = []
    scores: list[float] = []
    owners: list[int] = []
    kinds: list[int] = []
    segmenters: dict[str, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    start, about = 0, None
    while True:
        answers = call(options, f"{PAIRS}?start={start}")
        num = 0
        for rank, one in enumerate(answers):
            about = one
            num = max(num, len(one["scores"]))
            width = (len(one["layers"]) + 1) * one["hidden_size"]
            raw = bytearray(base64.b64decode(one["states"]))
            if raw:
                part = torch.frombuffer(raw, dtype=torch.float16)
                states.append(part.view(-1, width).float())
            scores += one["scores"]
            for owner in one["requests"]:
                owners.append(numbers.setdefault((rank, owner), len(numbers)))
            for name in one["segmenters"]:
                kinds.append(segmenters.setdefault(name, len(segmenters)))
        if not num:
            break
        start += num
    if not states or about is None:
        raise ValueError(
            f"--url {options.url}: the server there has kept no pairs; expected "
            "requests whose drafts it judges by its own question."
        )
    learnt = about["learnt"]
    return Collected(
        Pairs(
            torch.cat(states),
            torch.tensor(scores),
            torch.tensor(owners),
            torch.tensor(kinds),
        ),
        Learnt(
            Target(**learnt["target"]),
            learnt["question"],
            tuple(learnt["suffix"]),
            learnt["threshold"],
        ),
        tuple(about["layers"]),
        about["hidden_size"],
        tuple(segmenters),
    )


def ask_items(options: TrainOptions) -> None:
    """Have the server judge its drafts of the items. Raises LoadError."""
    info = call(options, "/server_info")
    chat = Chat(load_tokenizer(info["tokenizer_path"]), options.chat_template)
    items = load_items(
        options.dataset,
        problems=options.problems,
        seed=options.seed,
        path=options.path,
    )
    asyncio.run(_ask_all(options, items, chat))


async def _ask_all(options: TrainOptions, items: Sequence[Item], chat: Chat) -> None:
    gate = asyncio.Semaphore(options.concurrency)
    limit = options.max_new_tokens or DATA_SETS[options.dataset].max_new_tokens
    names: tuple[str | None, ...] = options.segmenters or (None,)
    kinds = [(t, s) for t in options.temperatures for s in names]
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=options.concurrency),
        headers=options.headers,
    )
    with tqdm(total=len(items) * len(kinds), unit="req") as bar:

        async def one(item: Item, temperature: float, name: str | None) -> None:
            custom = {"parse_mode": "semantic", "parse_judge": "suffix"}
            if name is not None:
                custom["parse_segmenter"] = name
            ids = chat.encode([{"role": "user", "content": item.turns[0]}])
            body = {
                "input_ids": ids,
                "sampling_params": {
                    "temperature": temperature,
                    "max_new_tokens": limit,
                    "custom_params": custom,
                },
            }
            async with (
                gate,
                session.post(options.url + "/generate", json=body) as answer,
            ):
                if answer.status != 200:
                    told = (await answer.text())[:200]
                    raise LoadError(f"/generate answered {answer.status}: {told}")
                await answer.read()
            bar.update()

        async with session:
            await asyncio.gather(
                *(one(item, t, name) for t, name in kinds for item in items)
            )


# -- The report ----------------------------------------------------------------------


def report_text(found: Collected, fit: Fit, seconds: float) -> str:
    """Markdown: how the probe compares with the question on requests held out."""
    pairs = found.pairs
    lines = [
        f"{len(pairs)} pairs of {len(set(pairs.requests.tolist()))} requests; learnt "
        f"in {seconds:.1f} s from {fit.report['learning_pairs']} of them. Compared "
        f"with the question on {fit.report['held_out_requests']} other requests:\n",
        "| segmenter | pairs | invalid | AUC | agreement | true accepts "
        "| false accepts | calibration error | in doubt | false accepts with doubt |",
        "|---" * 10 + "|",
    ]
    for kind, row in fit.report["by_kind"].items():
        lines.append(
            f"| {found.segmenters[kind]} | {row['pairs']} | {row['invalid_pairs']} "
            f"| {row['auc']:.4f} | {row['agreement']:.2%} | {row['true_accepts']:.2%} "
            f"| {row['false_accepts']:.2%} | {row['calibration_error']:.3f} "
            f"| {row['in_doubt']:.2%} | {row['false_accepts_with_doubt']:.2%} |"
        )
    lines += [
        "",
        "| segmenter | cutoff | true accepts | false accepts |",
        "|---" * 4 + "|",
    ]
    for kind, row in fit.report["by_kind"].items():
        name = found.segmenters[kind]
        for cutoff, accepts, wrong in row["roc"]:
            lines.append(f"| {name} | {cutoff:g} | {accepts:.2%} | {wrong:.2%} |")
    return "\n".join(lines)
