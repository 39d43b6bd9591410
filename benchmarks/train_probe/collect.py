"""A running server's pairs for a probe: have it judge drafts, and read what it wrote.

Where the data set can check a prefix, each pair gets a gold label too.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    def chat_template(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Collected:
    """Pairs of a server, what they are bound to, and the segmenters by number."""

    pairs: Pairs
    learnt: Learnt
    layers: tuple[int, ...]
    hidden_size: int
    segmenters: tuple[str, ...]


def read_pairs(path: Path, gold: Mapping[str, Verdicts]) -> Collected:
    """The pairs of a file of `--speculative-parse-probe-collect`.

    gold: what is known of requests, by their ids. Raises ValueError where it has none.
    """
    try:
        about, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as e:
        raise ValueError(
            f"--pairs {str(path)!r} holds no pairs ({e}); start the server with "
            f"{flag_name('probe_collect')} {path}."
        ) from e
    if not rows:
        raise ValueError(
            f"--pairs {str(path)!r}: the server has written no pairs; expected "
            "requests whose drafts it judges by its own question."
        )
    states = bytearray(b"".join(base64.b64decode(row["state"]) for row in rows))
    labels = [
        gold_label(gold.get(row["request"], ()), row["index"], row["score"])
        for row in rows
    ]
    owners = {rid: k for k, rid in enumerate({row["request"]: 0 for row in rows})}
    kinds = {name: k for k, name in enumerate({row["segmenter"]: 0 for row in rows})}
    pairs = Pairs(
        torch.frombuffer(states, dtype=torch.float16).view(len(rows), -1).float(),
        torch.tensor([row["score"] for row in rows]),
        torch.tensor([owners[row["request"]] for row in rows]),
        torch.tensor([kinds[row["segmenter"]] for row in rows]),
        torch.tensor(labels),
    )
    learnt = about["learnt"]
    return Collected(
        pairs,
        Learnt(
            TargetHashes(**learnt["target"]),
            learnt["question"],
            tuple(learnt["suffix"]),
            learnt["threshold"],
        ),
        tuple(about["layers"]),
        about["hidden_size"],
        tuple(kinds),
    )


def ask_items(source: Source, items: Sequence[Item]) -> dict[str, Verdicts]:
    """Have the server judge its drafts of the items.

    Returns what is known of their verdicts, by request id. Raises LoadError.
    """
    request = urllib.request.Request(
        source.url + "/server_info", headers=source.headers
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            tokenizer = load_tokenizer(json.load(answer)["tokenizer_path"])
    except (OSError, ValueError) as e:
        raise ValueError(
            f"--url {source.url}: no SGLang server answers there ({e})."
        ) from e
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
