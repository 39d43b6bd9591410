"""Conversations with a server: their items one after another, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.arms import Arm
from benchmarks.harness.datasets import Item
from benchmarks.harness.procedures import PROCEDURES, Answer, Client
from sglang_parse.demo.load import LoadError


class Chat:
    """Conversations as token ids under a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._options = dict(options)

    def encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._options
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@contextlib.contextmanager
def named_errors(name: str) -> Iterator[None]:
    """LoadErrors inside, of task groups too, come out as one that says `name` first."""
    # No `except*`: before Python 3.11.4 what it raises comes out in a group.
    try:
        yield
    except LoadError as e:
        raise LoadError(f"{name}: {e}") from e
    except BaseExceptionGroup as group:
        ours, others = group.split(LoadError)
        if ours is None or others is not None:
            raise
        raise LoadError(f"{name}: {first_error(ours)}") from group


def first_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first of a task group's errors, which nest as its groups do."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first


async def ask_all(
    client: Client,
    arm: Arm,
    items: Sequence[Item],
    concurrency: int,
    chat: Chat,
    on_answer: Callable[[int, tuple[Answer, ...]], None] = lambda *_: None,
) -> None:
    """Every item's conversation, `concurrency` of them at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> None:
        async with gate:
            answers = await converse(client, arm, items[index], chat)
        on_answer(index, answers)

    async with asyncio.TaskGroup() as group:
        for index in range(len(items)):
            group.create_task(one(index))


async def converse(
    client: Client, arm: Arm, item: Item, chat: Chat
) -> tuple[Answer, ...]:
    """The turns of an item, each with the answers before it."""
    messages: list[dict[str, str]] = []
    answers: list[Answer] = []
    for turn in item.turns:
        messages.append({"role": "user", "content": turn})
        answer = await PROCEDURES[arm.procedure](client, chat.encode(messages))
        if set(arm.servers.values()) == {"draft"}:
            answer = dataclasses.replace(answer, target_passes=0)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
    return tuple(answers)
