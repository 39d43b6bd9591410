"""Cells of a run and their files.

A cell is one arm with one set of options on one data set at one concurrency, once. It
is written request by request to `NAME.jsonl.partial`; when the last request of it and
of all cells that take turns with it is answered, they become `NAME.jsonl.gz`: a
finished cell is one that has this file. A cell that was cut short is measured anew, all
its laps, and so are those that took turns with it: what is compared is measured side by
side.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.harness.procedures import Answer, Round

BASELINE = "target"  # the arm that others are compared with
# File names hold at most 255 bytes.
LONGEST_LABEL = 150


@dataclass(frozen=True)
class Cell:
    """spec: all that decides what is asked and of whom, as plain JSON. options:
    custom_params on top of the arm's, in a sweep. num_items: requests. group: of the
    arms whose servers are up together; the baseline has cells in all of them."""

    arm: str
    dataset: str
    concurrency: int
    repeat: int
    num_items: int
    spec: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_sweep: bool = False
    group: int = 0

    @property
    def laps(self) -> int:
        """Parts that it is measured in; a spec without this is of one."""
        return int(self.spec.get("laps", 1))

    @property
    def name(self) -> str:
        """Path below the run's `cells` folder, without ending."""
        place = f"{self.dataset}-c{self.concurrency}-r{self.repeat}"
        if self.arm == BASELINE and self.group:
            place += f"-beside{self.group}"
        if not self.is_sweep:
            return f"{self.arm}/{place}"
        whole = options_label(self.options)
        label = re.sub(r"[^\w.=,-]", "-", whole)[:LONGEST_LABEL]
        if label != whole:
            label += f"-{zlib.crc32(whole.encode()):08x}"
        return f"{self.arm}.sweep/{place}-{label or 'default'}"


def options_label(options: Mapping[str, Any]) -> str:
    """`threshold=0.5,segmenter=step`: options of a request, briefly."""
    return ",".join(f"{k.removeprefix('parse_')}={v}" for k, v in options.items())


@dataclass(frozen=True)
class CellResult:
    """A finished cell. ids: of its items. answers: per item, one per turn. wall_s:
    first send to last answer, of all its parts together."""

    cell: Cell
    provenance: Mapping[str, Any]
    ids: tuple[str, ...]
    answers: tuple[tuple[Answer, ...], ...]
    wall_s: float


class CellStore:
    """The cells of a run below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: Cell, ending: str = ".jsonl.gz") -> Path:
        return self.folder / "cells" / (cell.name + ending)

    def is_finished(self, cell: Cell) -> bool:
        """Whether the cell has results; nothing else of it is then left. Raises
        ValueError if they are of another spec."""
        path = self.path(cell)
        if not path.is_file():
            return False
        with gzip.open(path, "rt", encoding="utf-8") as f:
            spec = json.loads(f.readline())["spec"]
        ours = _plain(cell.spec)
        # A field that older results lack is as if it were empty.
        keys = {*spec, *ours} - ({"items"} - {*spec})  # not known of older ones
        differing = sorted(k for k in keys if (spec.get(k) or 0) != (ours.get(k) or 0))
        if differing:
            raise ValueError(
                f"{path} was measured with other settings ({', '.join(differing)}); "
                "give another --out or delete that file."
            )
        # Left by a run that was killed at its very end.
        self.path(cell, ".jsonl.partial").unlink(missing_ok=True)
        return True

    @contextmanager
    def writing(
        self, cell: Cell, provenance: Mapping[str, Any]
    ) -> Iterator[CellWriter]:
        """Write a cell, which `finish` is then to be told of."""
        partial = self.path(cell, ".jsonl.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as f:
            writer = CellWriter(f)
            writer.line({"spec": cell.spec, "provenance": provenance})
            yield writer

    def finish(self, cells: Sequence[Cell]) -> None:
        """Cells that were written to their last line are finished, all together."""
        for cell in cells:
            whole = self.path(cell, ".jsonl.partial").read_bytes()
            packed = self.path(cell, ".jsonl.gz.new")
            packed.write_bytes(gzip.compress(whole, mtime=0))
            self.path(cell, ".grades.json").unlink(missing_ok=True)
        for cell in cells:
            os.replace(self.path(cell, ".jsonl.gz.new"), self.path(cell))
        for cell in cells:
            self.path(cell, ".jsonl.partial").unlink()

    def read(self, cell: Cell) -> CellResult:
        with gzip.open(self.path(cell), "rt", encoding="utf-8") as f:
            header, *lines = map(json.loads, f)
        rows = sorted((line for line in lines if "index" in line), key=_index)
        (wall_s,) = (line["wall_s"] for line in lines if "wall_s" in line)
        answers = tuple(tuple(map(_answer, row["turns"])) for row in rows)
        ids = tuple(row["id"] for row in rows)
        return CellResult(cell, header["provenance"], ids, answers, wall_s)

    def read_grades(self, cell: Cell, by: str = "") -> dict[str, Any] | None:
        """The grades of this very result, None if there are none or others'. by: what
        else they depend on: the references, the rater of open answers."""
        path = self.path(cell, ".grades.json")
        if not path.is_file():
            return None
        grades: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        of = grades.pop("of", None)
        return grades if of == self._mark(cell, by) else None

    def write_grades(self, cell: Cell, grades: Mapping[str, Any], by: str = "") -> None:
        row = {"of": self._mark(cell, by), **grades}
        new = self.path(cell, ".grades.json.new")
        new.write_text(json.dumps(row) + "\n", encoding="utf-8")
        os.replace(new, self.path(cell, ".grades.json"))

    def _mark(self, cell: Cell, by: str) -> list[str]:
        return [f"{zlib.crc32(self.path(cell).read_bytes()):08x}", by]


class CellWriter:
    """Lines of a cell that is being measured, each on disk when it is written."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def line(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def answers(self, index: int, item_id: str, answers: tuple[Answer, ...]) -> None:
        turns = [_row(a) for a in answers]
        self.line({"index": index, "id": item_id, "turns": turns})


def _plain(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def _index(row: Mapping[str, Any]) -> int:
    return int(row["index"])


def _row(answer: Answer) -> dict[str, Any]:
    row = dataclasses.asdict(answer)
    row["rounds"] = [
        {**dataclasses.asdict(r), "scores": [round(s, 7) for s in r.scores]}
        for r in answer.rounds
    ]
    return row


def _answer(row: Mapping[str, Any]) -> Answer:
    rounds = tuple(
        Round(
            at=r["at"],
            draft=tuple(r["draft"]),
            ends=tuple(r["ends"]),
            scores=tuple(r["scores"]),
            num_kept=r["num_kept"],
        )
        for r in row["rounds"]
    )
    token_ids = tuple(row["token_ids"])
    return Answer(**{**row, "rounds": rounds, "token_ids": token_ids})
