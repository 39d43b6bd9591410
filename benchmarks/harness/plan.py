"""Which cells a run has, and in what order they are measured."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arms import Arm, model_path
from benchmarks.harness.cells import BASELINE, Cell
from benchmarks.harness.config import BenchConfig, DataSetSpec
from benchmarks.harness.datasets import Item, load_items

QUICK_BYTES = 1 << 28


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
