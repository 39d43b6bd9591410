"""The head's training texts: what the target answers to generated questions."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from benchmarks.real_model.prompts import Conversation
from benchmarks.train_real.decode import Answer, answers
from benchmarks.train_real.questions import questions

logger = logging.getLogger("train_real")
BATCH = 128  # answers that are decoded together, and of one file
BLOCK = 4  # batches whose questions are sorted by length


def contexts_of(tokenizer: Any, asked: list[Conversation]) -> list[list[int]]:
    """Token ids of conversations, up to where the answer begins."""
    texts = [
        tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)
        for m in asked
    ]
    return [tokenizer.encode(t, add_special_tokens=False) for t in texts]


def batches_of(contexts: list[list[int]]) -> list[list[list[int]]]:
    """Batches of about one length; those of a longer list begin with the same ones."""
    found = []
    for at in range(0, len(contexts), BATCH * BLOCK):
        block = sorted(contexts[at : at + BATCH * BLOCK], key=len)
        found += [block[i : i + BATCH] for i in range(0, len(block), BATCH)]
    return found


def write_texts(
    model: Any,
    tokenizer: Any,
    folder: Path,
    *,
    count: int,
    longest: int,
    seed: int,
    until: float,
    threads: int = 1,
) -> list[Answer]:
    """Answers of `folder`, with new ones until `count` of them or a time.

    until: of time.monotonic(). Each batch is a file, written as soon as it is there.
    Each thread decodes batches of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounded = -(-count // (BATCH * BLOCK)) * BATCH * BLOCK
    batches = batches_of(contexts_of(tokenizer, questions(rounded, seed)))
    paths = [folder / f"{n:04d}.safetensors" for n in range(-(-count // BATCH))]
    # transformers changes a model while it reads, so that no two threads share one.
    free: SimpleQueue[Any] = SimpleQueue()
    for n in range(threads):
        free.put(deepcopy(model) if n else model)

    def one(path: Path, batch: list[list[int]]) -> None:
        if path.is_file() or time.monotonic() >= until:
            return
        torch.set_num_threads(1)
        own = free.get()
        try:
            write(path, decoded(own, batch, longest))
        finally:
            free.put(own)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, paths, batches))
    there = takewhile(Path.is_file, paths)
    return [answer for path in there for answer in read(path)]


def decoded(model: Any, batch: list[list[int]], longest: int) -> list[Answer]:
    began, busy = time.monotonic(), time.thread_time()
    found = answers(model, batch, longest)
    logger.info(
        "%d answers, %d tokens in %.0f s, %.0f s of CPU time",
        len(found),
        sum(len(a.own) for a in found),
        time.monotonic() - began,
        time.thread_time() - busy,
    )
    return found


def write(path: Path, found: list[Answer]) -> None:
    """A file of answers, seen by others only when it is whole."""
    tensors = {
        "ids": torch.tensor([i for a in found for i in a.context + a.own]),
        "contexts": torch.tensor([len(a.context) for a in found]),
        "own": torch.tensor([len(a.own) for a in found]),
        "states": torch.cat([a.states for a in found]),
    }
    unfinished = path.with_suffix(".part")
    save_file(tensors, unfinished)
    unfinished.replace(path)


def read(path: Path) -> list[Answer]:
    """The answers of a file. Raises ValueError where it is no such file."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} holds no answers; delete it") from error
    before, own = (tensors[k].tolist() for k in ("contexts", "own"))
    lengths = [a + b for a, b in zip(before, own, strict=True)]
    texts = [t.tolist() for t in tensors["ids"].split(lengths)]
    states = tensors["states"].split([n - 1 for n in lengths])
    return [
        Answer(text[:n], text[n:], some)
        for text, n, some in zip(texts, before, states, strict=True)
    ]
