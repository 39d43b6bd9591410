"""`sglang-parse bench`: measure every cell that has no results yet, then report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import tempfile
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_parse.bench.arms import (
    JUDGING_KINDS,
    SHUFFLED,
    UNSPECULATIVE_KINDS,
    Arm,
    arm_draft,
    model_path,
    refusal,
    server_flags,
)
from sglang_parse.bench.cells import BASELINE, Cell, CellStore, CellWriter
from sglang_parse.bench.config import BenchConfig, DataSetSpec
from sglang_parse.bench.datasets import DATA_SETS, Item, load_items
from sglang_parse.bench.grade import Decode, grade_cell, lacks_ratings, rated
from sglang_parse.bench.load import (
    LoadError,
    flush_cache,
    load_tokenizer,
    open_session,
)
from sglang_parse.bench.procedures import PROCEDURES, Answer, Client
from sglang_parse.bench.provenance import gpu_names, hub_commit, provenance
from sglang_parse.bench.servers import DEFAULT_TIMEOUT_S, ServerProcess, running
from sglang_parse.bench.summary import Graded
from sglang_parse.judging.prompt import JudgePrompt, build_judge_prompt
from sglang_parse.options.server import ParseConfig

logger = logging.getLogger(__name__)

QUICK_BYTES = 1 << 28
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


def run_benchmark(config: BenchConfig) -> Path:
    """Measure what is missing, grade it, and write the report; returns its path.

    Raises ValueError before anything starts where the config cannot be run here, and
    ServerError or LoadError when a server fails; finished cells stay.
    """
    check_arms(config)
    items = {spec: load_set(config, spec) for spec in data_sets(config)}
    store = CellStore(config.out)
    cells = plan_cells(config, items)
    pending = [cell for cell in cells if not store.is_finished(cell)]
    tokenizer = load_tokenizer(model_path(config.models.target))
    chat = Chat(tokenizer, config.chat_template)
    total = sum(cell.num_items for cell in pending)
    with tqdm(total=total, unit="req", disable=not total) as bar:
        for batch, todo in batches(config, pending):
            bar.set_description(f"starting {', '.join(a.name for a in batch)}")
            with arm_servers(batch, config) as urls:
                jobs = [
                    Job(cell, arm, config, items[cell_spec(cell)], urls[arm.name], chat)
                    for arm, cell in itertools.product(batch, todo)
                    if cell.arm == arm.name
                ]
                for group in taking_turns(jobs, config.laps):
                    measure_cells(group, store, bar)
    graded = [
        graded_cell(cell, items[cell_spec(cell)], config, store, chat.decode)
        for cell in cells
    ]
    from sglang_parse.bench.table import write_report

    return write_report(config, graded)


def graded_cell(
    cell: Cell,
    items: Sequence[Item],
    config: BenchConfig,
    store: CellStore,
    decode: Decode,
) -> Graded:
    """A finished cell with its grades, which are made where they are not there yet."""
    by = checksum([item.reference for item in items])
    by += f" {config.rater}" if rated(cell) else ""
    result, grades = store.read(cell), store.read_grades(cell, by)
    if grades is None or (config.rater and lacks_ratings(grades)):
        known = grades["ratings"] if grades else None
        grades = grade_cell(
            result, items, decode=decode, judge=config.judge, ratings=known
        )
        store.write_grades(cell, grades, by)
    return Graded(result, grades)


def check_arms(config: BenchConfig) -> None:
    """Raise ValueError with the sentence of the first arm that cannot run here."""
    has_gpu = bool(gpu_names())
    for arm in config.arms:
        reason = refusal(arm, config.models, has_gpu=has_gpu)
        if reason:
            raise ValueError(reason)
        if arm.draft == SHUFFLED:
            arm_draft(arm, config.models)


def data_sets(config: BenchConfig) -> list[DataSetSpec]:
    """The run's data sets; the sweep's may be a smaller share of one of them."""
    sweep = [config.sweep.dataset] if config.sweep else []
    return list(dict.fromkeys([*config.datasets, *sweep]))


def load_set(config: BenchConfig, spec: DataSetSpec) -> list[Item]:
    return load_items(
        spec.name, problems=spec.problems, seed=config.seed, path=spec.path
    )


def plan_cells(
    config: BenchConfig, items: Mapping[DataSetSpec, Sequence[Item]]
) -> list[Cell]:
    """All cells, arm by arm; behind an arm's own cells those of its sweep.

    Where arms take turns, the baseline does with every group of them.
    """
    groups = list(enumerate(arm_groups(config)))

    def cell(
        arm: Arm,
        spec: DataSetSpec,
        concurrency: int,
        repeat: int,
        group: int,
        **more: Any,
    ) -> Cell:
        if config.laps > 1:
            more |= {"laps": config.laps, "group": group}
        return Cell(
            group=group,
            arm=arm.name,
            dataset=spec.name,
            concurrency=concurrency,
            repeat=repeat,
            num_items=len(items[spec]),
            spec={
                **settings(config),
                "arm": dataclasses.asdict(arm) | {"about": "", "concurrency": ()},
                "draft_weights": fingerprint(model_path(arm.draft))
                if arm.draft
                else "",
                "dataset": dataclasses.asdict(spec),
                "items": checksum([(item.id, item.turns) for item in items[spec]]),
                "concurrency": concurrency,
                **more,
            },
            options=more.get("options", {}),
            is_sweep="options" in more,
        )

    cells = []
    for arm in config.arms:
        own = arm.concurrency or config.concurrency
        (home,) = (group for group, arms in groups if arm in arms)
        asked: dict[int, Sequence[int]] = {home: own}
        if arm.name == BASELINE and config.laps > 1:
            for group, arms in groups:
                if group != home:
                    theirs = {c for a in arms for c in a.concurrency or own}
                    asked[group] = [c for c in own if c in theirs]
        cells += [
            cell(arm, spec, concurrency, repeat, group)
            for spec in config.datasets
            for group, found in asked.items()
            for concurrency in found
            for repeat in range(config.repeats)
        ]
        if config.sweep and config.sweep.arm == arm.name:
            sweep = config.sweep
            cells += [
                cell(arm, sweep.dataset, sweep.concurrency, 0, home, options=options)
                for options in sweep.combinations()
            ]
    return cells


def batches(
    config: BenchConfig, pending: Sequence[Cell]
) -> Iterator[tuple[list[Arm], list[Cell]]]:
    """Arms whose servers are up together, with the cells to measure on them: the same
    arms in every repeat, and when a run goes on.

    Repeats are apart in time, each with servers of its own: they show what another
    hour on the machine gives. Every other one takes the arms from last to first, so
    that a machine that gets slower does not favour the same arms again.
    """
    groups = range(len(arm_groups(config)))
    for repeat in range(config.repeats):
        way = -1 if repeat % 2 else 1
        for group in groups[::way]:
            todo = [c for c in pending if (c.repeat, c.group) == (repeat, group)]
            names = {cell.arm for cell in todo}
            arms = [arm for arm in config.arms if arm.name in names]
            if arms:
                yield arms[::way], todo


def arm_groups(config: BenchConfig) -> list[Sequence[Arm]]:
    """Arms whose servers start side by side; the baseline may join the others'."""
    size = config.boot_together
    return [config.arms[at : at + size] for at in range(0, len(config.arms), size)]


def settings(config: BenchConfig) -> dict[str, Any]:
    """What all cells of a run share, as part of their spec."""
    names = (
        *("seed", "warm_up", "server_args", "model_cpus", "temperature"),
        *("threshold", "judge_suffix", "step_stop", "chat_template"),
    )
    values = {name: getattr(config, name) for name in names}
    models = dataclasses.asdict(config.models)
    weights = {name: fingerprint(model_path(name)) for name in models.values() if name}
    return values | {"models": models, "weights": weights}


@functools.cache
def fingerprint(model: str) -> str:
    """Sizes, and checksums where they are quick, of a local model's weight files, so
    that results of a model that was trained anew are not mixed with older ones."""
    marks = []
    for path in sorted(Path(model).glob("*.safetensors")):
        size = path.stat().st_size
        crc = zlib.crc32(path.read_bytes()) if size < QUICK_BYTES else 0
        marks.append(f"{path.name}:{size}:{crc:08x}")
    return " ".join(marks)


def checksum(values: Sequence[Any]) -> str:
    """Of what the values look like."""
    return f"{zlib.crc32(repr(values).encode()):08x}"


def cell_spec(cell: Cell) -> DataSetSpec:
    """The data set of a cell."""
    return DataSetSpec(**cell.spec["dataset"])


# -- Servers -------------------------------------------------------------------


@contextlib.contextmanager
def arm_servers(
    arms: Sequence[Arm], config: BenchConfig
) -> Iterator[dict[str, dict[str, str]]]:
    """Fresh servers of some arms, started side by side; yields urls by arm and role.

    A model alone is served once for all of these arms: such a server keeps nothing
    from one cell to the next but its radix cache, which is flushed. Logs stay if a
    server fails.
    """
    logs = Path(tempfile.mkdtemp(prefix="sglang-parse-bench-"))
    servers: dict[tuple[str, str], ServerProcess] = {}
    alone: dict[tuple[str, ...], ServerProcess] = {}
    for arm in arms:
        draft = arm_draft(arm, config.models)
        for role, kind in arm.servers.items():
            flags = server_flags(
                arm,
                kind,
                config.models,
                config.server_args,
                draft,
                judging=config.judging_flags,
            )
            name = f"{arm.name}-{role}"
            server = alone.get(tuple(flags)) or make_server(
                flags, name, logs / f"{name}.log", config.boot_timeout_s
            )
            servers[arm.name, role] = server
            if kind in UNSPECULATIVE_KINDS:
                alone[tuple(flags)] = server
    started = list(dict.fromkeys(servers.values()))
    try:
        with running(started):
            pin_models(started, config.model_cpus)
            yield {
                arm.name: {role: servers[arm.name, role].url for role in arm.servers}
                for arm in arms
            }
        for log in logs.iterdir():
            log.unlink()
    finally:
        with contextlib.suppress(OSError):  # raised where it holds logs
            logs.rmdir()


def make_server(
    flags: list[str], name: str, log: Path, timeout_s: float = DEFAULT_TIMEOUT_S
) -> ServerProcess:
    return ServerProcess(flags, name, log, timeout_s=timeout_s)


def pin_models(servers: Sequence[ServerProcess], cpus: Sequence[int]) -> None:
    """Put the processes that run models on `cpus`, all of them on the same.

    An arm with two servers then has no more hardware than an arm with one. Cores that
    this process may not use are left out.
    """
    allowed = set(cpus) & os.sched_getaffinity(0)
    if not cpus:
        return
    if not allowed:
        logger.warning("model_cpus %s are not ours to use; models run anywhere.", cpus)
        return
    for server in servers:
        for process in server.processes():
            if "sglang::scheduler" not in " ".join(process.cmdline()):
                continue
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, allowed)


# -- One cell ------------------------------------------------------------------


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
    judge = JudgePrompt((0,), ((0, 1),), False)  # asked by the server, not by us
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
