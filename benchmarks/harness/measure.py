"""Measuring cells, which take turns part by part."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.arms import JUDGING_KINDS, Arm
from benchmarks.harness.cells import Cell, CellStore, CellWriter
from benchmarks.harness.config import BenchConfig
from benchmarks.harness.conversation import Chat, ask_all, named_errors
from benchmarks.harness.datasets import DATA_SETS, Item, load_items
from benchmarks.harness.plan import cell_spec
from benchmarks.harness.procedures import Answer, Client
from benchmarks.provenance import provenance
from sglang_parse.demo.load import LoadError, flush_cache, open_session
from sglang_parse.judging.prompt import JudgePrompt, build_judge_prompt
from sglang_parse.options.server import ParseConfig

# What a server decides for itself where no flag says so, from its /server_info.
SERVER_FACTS = (
    *("version", "dtype", "kv_cache_dtype", "attention_backend"),
    *("max_total_num_tokens", "chunked_prefill_size"),
)
# What names the models of a server there, and what their revisions.
SERVER_MODELS = (
    ("model_path", "revision"),
    ("speculative_draft_model_path", "speculative_draft_model_revision"),
)
WARM_UP_OFFSET = 1  # added to the seed: warm-up problems are others


@dataclass(frozen=True)
class Job:
    """A cell with all it takes to measure it. urls: of the arm's servers, by role."""

    cell: Cell
    arm: Arm
    config: BenchConfig
    items: Sequence[Item]
    urls: Mapping[str, str]
    chat: Chat


def taking_turns(jobs: Sequence[Job], laps: int) -> list[list[Job]]:
    """Jobs that are measured in turns: with laps those that differ by their arm alone,
    and the settings of a sweep; else each by itself."""
    groups: dict[tuple[str | int, ...], list[Job]] = {}
    for job in jobs:
        cell = job.cell
        place = (cell.dataset, cell.concurrency, cell.repeat, cell.is_sweep)
        groups.setdefault((cell.name,) if laps == 1 else place, []).append(job)
    return list(groups.values())


def measure_cells(jobs: Sequence[Job], store: CellStore, bar: tqdm[Any]) -> None:
    """Measure a part of every cell, then the next of every cell from last to first,
    and so on. All are finished when the last part is done. Raises LoadError."""
    asyncio.run(_measure_cells(jobs, store, bar))


async def _measure_cells(jobs: Sequence[Job], store: CellStore, bar: tqdm[Any]) -> None:
    beside = [job.cell.name for job in jobs]
    cells = [measure_cell(job, store, bar, beside) for job in jobs]
    async with contextlib.AsyncExitStack() as stack:
        for cell in cells:
            await stack.enter_async_context(contextlib.aclosing(cell))
        while cells:
            cells = [cell for cell in cells if await anext(cell, False)][::-1]
    store.finish([job.cell for job in jobs])


async def measure_cell(
    job: Job, store: CellStore, bar: tqdm[Any], beside: Sequence[str]
) -> AsyncGenerator[bool, None]:
    """Warm up, then flush and ask the items, part by part; yields True between two
    parts, where others have their turn. beside: names of the cells that take turns.
    Raises LoadError."""
    concurrency, timeout_s = job.cell.concurrency, job.config.request_timeout_s
    wall_s = 0.0
    with named_errors(job.cell.name), contextlib.ExitStack() as stack:
        for part in cut(len(job.items), job.cell.laps):
            bar.set_description(job.cell.name)
            # Of its own: servers close connections that wait for the other arms.
            async with open_session(2 * concurrency, timeout_s) as session:
                client = make_client(job, session)
                if not part.start:
                    warm_up = warm_up_items(job)
                    await ask_all(client, job.arm, warm_up, concurrency, job.chat)
                for url in job.urls.values():
                    await flush_cache(url)
                if not part.start:
                    origin = await cell_origin(job, session)
                    origin["turns"] = list(beside)
                    writer = stack.enter_context(store.writing(job.cell, origin))
                wall_s += await ask_part(job, client, part, writer, bar)
            if part.stop < len(job.items):
                yield True
        writer.line({"wall_s": wall_s})


def cut(num_items: int, laps: int) -> list[range]:
    """Contiguous parts, equal but for one item; one each where `laps` are more."""
    num = max(1, min(laps, num_items))
    marks = [num_items * k // num for k in range(num + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(marks)]


async def cell_origin(job: Job, session: Any) -> dict[str, Any]:
    """Where the cell's results come from, its servers included. Raises LoadError."""
    servers = {role: await server_facts(session, url) for role, url in job.urls.items()}
    return provenance() | {"servers": servers}


async def ask_part(
    job: Job, client: Client, part: range, writer: CellWriter, bar: tqdm[Any]
) -> float:
    """Ask a part's items and write their answers; returns the seconds it took."""

    def answered(index: int, answers: tuple[Answer, ...]) -> None:
        index += part.start
        writer.answers(index, job.items[index].id, answers)
        bar.update()

    items = job.items[part.start : part.stop]
    start = time.perf_counter()
    await ask_all(client, job.arm, items, job.cell.concurrency, job.chat, answered)
    return time.perf_counter() - start


async def server_facts(session: Any, url: str) -> dict[str, Any]:
    """SERVER_FACTS of a server, as it resolved them, and the commits of its models
    where they are of the hub. Raises LoadError."""
    async with session.get(url + "/server_info") as response:
        if response.status != 200:
            raise LoadError(f"{url}/server_info answered {response.status}.")
        info = await response.json(content_type=None)
    commits = {
        name: hub_commit(str(info[name]), info.get(revision))
        for name, revision in SERVER_MODELS
        if info.get(name)
    }
    facts = {name: info.get(name) for name in SERVER_FACTS}
    return facts | {"hub_commits": {n: c for n, c in commits.items() if c}}


def warm_up_items(job: Job) -> list[Item]:
    """Problems that are not timed: others where there is a generator, else some of the
    same, which the radix cache has forgotten when the clock starts."""
    num = max(job.config.warm_up, job.cell.concurrency)
    if job.cell.dataset == "embedded":
        seed = job.config.seed + WARM_UP_OFFSET
        return load_items("embedded", problems=num, seed=seed)
    return list(itertools.islice(itertools.cycle(job.items), num))


def make_client(job: Job, session: Any) -> Client:
    """The client of a cell's arm, with the options of the arm and of the cell."""
    arm, config = job.arm, job.config
    options = {**arm.options, **job.cell.options}
    if arm.servers.get("main") in JUDGING_KINDS:
        options["parse_report"] = True
    judge = JudgePrompt((0,), ((0, 1),))  # asked by the server, not by us
    if arm.procedure == "sequential":
        pairs = ParseConfig().verdict_pairs
        judge = build_judge_prompt(job.chat.tokenizer, config.judge_suffix, pairs)
    limit = cell_spec(job.cell).max_new_tokens
    return Client(
        session=session,
        urls=job.urls,
        options=options,
        temperature=config.temperature,
        max_new_tokens=limit or DATA_SETS[job.cell.dataset].max_new_tokens,
        threshold=config.threshold,
        step_stop=config.step_stop,
        suffix=judge.suffix,
        verdict_ids=judge.verdict_ids,
        decode=job.chat.decode,
    )


def hub_commit(model: str, revision: str | None = None) -> str:
    """Commit of a hub model as it lies in this machine's cache, for a name or for a
    folder of the cache; "" for other folders and what is not cached."""
    path = Path(model)
    if not path.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(model, "config.json", revision=revision)
        except ValueError:  # neither a folder nor a hub name
            return ""
        if not isinstance(found, str):
            return ""
        path = Path(found).parent
    return path.name if path.parent.name == "snapshots" else ""
