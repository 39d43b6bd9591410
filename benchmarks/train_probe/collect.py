"""A running server's pairs for a probe: have it judge drafts, and fetch what it kept.

Where the data set can check a prefix, each pair gets a gold label too.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from benchmarks.train_probe.fit import Pairs
from benchmarks.train_probe.gold import Verdicts, gold_label, gold_verdicts
from sglang_parse.calibrate.problems import Item
from sglang_parse.demo.load import (
    LoadError,
    encode_chat,
    load_tokenizer,
    open_session,
)
from sglang_parse.options.table import flag_name
from sglang_parse.probe.linear_probe import Learnt, TargetHashes

PAIRS = "/parse/probe/pairs"
WAIT_S = 2.0


class Source(Protocol):
    """Where pairs come from (`TrainOptions`)."""

    @property
    def url(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def prompts(self) -> str: ...
    @property
    def temperatures(self) -> tuple[float, ...]: ...
    @property
    def segmenters(self) -> tuple[str, ...]: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def from_traffic(self) -> int: ...
    @property
    def wait_s(self) -> float: ...
    @property
    def chat_template(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Collected:
    """Pairs of a server, what they are bound to, and the segmenters by number."""

    pairs: Pairs
    learnt: Learnt
    layers: tuple[int, ...]
    hidden_size: int
    segmenters: tuple[str, ...]


def forget_pairs(source: Source) -> None:
    """Have the server begin anew. Raises ValueError where it keeps none."""
    call(source, PAIRS, method="DELETE")


def call(source: Source, path: str, *, method: str = "GET") -> Any:
    """A JSON answer of the server. Raises ValueError where it gives none."""
    request = urllib.request.Request(
        source.url + path, headers=source.headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        if e.code in (401, 403):
            raise ValueError(
                f"--url {source.url} refuses {path} ({e.code}); give its --api-key."
            ) from e
        raise ValueError(
            f"--url {source.url}: the server there keeps no pairs ({e.code}); start "
            f"it with {flag_name('probe_collect')} 20000."
        ) from e
    except (urllib.error.URLError, OSError, ValueError) as e:
        raise ValueError(
            f"--url {source.url}: no SGLang server answers there ({e})."
        ) from e


def wait_for_pairs(source: Source) -> None:
    """Until the traffic has brought enough. Raises ValueError after wait_s seconds."""
    end = time.monotonic() + source.wait_s
    with tqdm(total=source.from_traffic, unit="pair") as bar:
        while True:
            (one, *_) = call(source, f"{PAIRS}?start={(1 << 20)}")
            bar.n = min(one["total"], source.from_traffic)
            bar.refresh()
            if one["total"] >= source.from_traffic:
                return
            if time.monotonic() > end:
                raise ValueError(
                    f"--from-traffic {source.from_traffic}: {one['total']} pairs came "
                    f"in {source.wait_s:.0f} s; expected more traffic, or a larger "
                    f"{flag_name('probe_collect')}."
                )
            time.sleep(WAIT_S)


class _Parts:
    """Answers of the endpoint, put together."""

    def __init__(self, gold: Mapping[str, Verdicts]) -> None:
        self._gold = gold
        self._states: list[torch.Tensor] = []
        self._scores: list[float] = []
        self._labels: list[int] = []
        self._owners: list[int] = []
        self._kinds: list[int] = []
        self._numbers: dict[tuple[int, str], int] = {}
        self._segmenters: dict[str, int] = {}
        self._about: dict[str, Any] = {}

    def add(self, rank: int, one: dict[str, Any]) -> int:
        """The pairs of one answer; how many they are. rank: data-parallel."""
        self._about = one
        width = (len(one["layers"]) + 1) * one["hidden_size"]
        if raw := bytearray(base64.b64decode(one["states"])):
            part = torch.frombuffer(raw, dtype=torch.float16)
            self._states.append(part.view(-1, width).float())
        self._scores += one["scores"]
        found = zip(one["requests"], one["indices"], one["scores"], strict=True)
        for rid, index, score in found:
            self._labels.append(gold_label(self._gold.get(rid, ()), index, score))
            numbers = self._numbers
            self._owners.append(numbers.setdefault((rank, rid), len(numbers)))
        for name in one["segmenters"]:
            kinds = self._segmenters
            self._kinds.append(kinds.setdefault(name, len(kinds)))
        return len(one["scores"])

    def collected(self) -> Collected | None:
        """All of it, None where there are no pairs."""
        if not self._states:
            return None
        learnt = self._about["learnt"]
        pairs = Pairs(
            torch.cat(self._states),
            torch.tensor(self._scores),
            torch.tensor(self._owners),
            torch.tensor(self._kinds),
            torch.tensor(self._labels),
        )
        return Collected(
            pairs,
            Learnt(
                TargetHashes(**learnt["target"]),
                learnt["question"],
                tuple(learnt["suffix"]),
                learnt["threshold"],
            ),
            tuple(self._about["layers"]),
            self._about["hidden_size"],
            tuple(self._segmenters),
        )


def fetch_pairs(source: Source, gold: Mapping[str, Verdicts]) -> Collected:
    """All pairs that the server keeps, of all its data-parallel ranks.

    gold: what is known of requests, by their ids. Raises ValueError where it has none.
    """
    parts, start = _Parts(gold), 0
    while True:
        answers = call(source, f"{PAIRS}?start={start}")
        num = max(parts.add(rank, one) for rank, one in enumerate(answers))
        if not num:
            break
        start += num
    found = parts.collected()
    if found is None:
        raise ValueError(
            f"--url {source.url}: the server there has kept no pairs; expected "
            "requests whose drafts it judges by its own question."
        )
    return found


def ask_items(source: Source, items: Sequence[Item]) -> dict[str, Verdicts]:
    """Have the server judge its drafts of the items.

    Returns what is known of their verdicts, by request id. Raises LoadError.
    """
    info = call(source, "/server_info")
    tokenizer = load_tokenizer(info["tokenizer_path"])
    return asyncio.run(_ask_all(source, items, tokenizer))


@dataclass(frozen=True)
class _Ask:
    """One request: its id, item, temperature and segmenter, None for the server's."""

    rid: str
    item: Item
    temperature: float
    segmenter: str | None


async def _ask_all(
    source: Source, items: Sequence[Item], tokenizer: Any
) -> dict[str, Verdicts]:
    names: tuple[str | None, ...] = source.segmenters or (None,)
    run = uuid.uuid4().hex
    kinds = [(t, name, item) for t in source.temperatures for name in names
             for item in items]  # fmt: skip
    asks = [_Ask(f"{run}-{k}", i, t, name) for k, (t, name, i) in enumerate(kinds)]
    gate, gold = asyncio.Semaphore(source.concurrency), {}
    session = open_session(source.concurrency, headers=source.headers)
    with tqdm(total=len(asks), unit="req") as bar:

        async def one(ask: _Ask) -> None:
            body = _body(source, ask, tokenizer)
            async with (
                gate,
                session.post(source.url + "/generate", json=body) as answer,
            ):
                if answer.status != 200:
                    told = (await answer.text())[:200]
                    raise LoadError(f"/generate answered {answer.status}: {told}")
                found = await answer.json()
            segments = found["meta_info"]["parse"].get("segments", [])
            gold[ask.rid] = gold_verdicts(ask.item, segments)
            bar.update()

        async with session:
            await asyncio.gather(*map(one, asks))
    return gold


def _body(source: Source, ask: _Ask, tokenizer: Any) -> dict[str, Any]:
    """What is sent to /generate."""
    custom: dict[str, Any] = {"parse_mode": "semantic", "parse_judge": "suffix"}
    custom["parse_report"] = not source.prompts
    if ask.segmenter is not None:
        custom["parse_segmenter"] = ask.segmenter
    ids = encode_chat(tokenizer, ask.item.prompt, source.chat_template)
    return {
        "rid": ask.rid,
        "input_ids": list(ids),
        "sampling_params": {
            "temperature": ask.temperature,
            "max_new_tokens": source.max_new_tokens,
            "custom_params": custom,
        },
    }
