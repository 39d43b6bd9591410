"""Measure every cell that has no results yet, then report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness.arm_servers import arm_servers
from benchmarks.harness.arms import SHUFFLED, arm_draft, model_path, refusal
from benchmarks.harness.cells import Cell, CellStore
from benchmarks.harness.config import BenchConfig
from benchmarks.harness.conversation import Chat
from benchmarks.harness.datasets import Item
from benchmarks.harness.grade import Decode, grade_cell, lacks_ratings, rated
from benchmarks.harness.measure import Job, measure_cells, taking_turns
from benchmarks.harness.plan import (
    batches,
    cell_spec,
    checksum,
    data_sets,
    load_set,
    plan_cells,
)
from benchmarks.harness.summary import Graded
from benchmarks.provenance import gpu_names
from sglang_parse.demo.load import load_tokenizer


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
    from benchmarks.harness.table import write_report

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
