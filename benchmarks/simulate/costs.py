"""Milliseconds of everything that a round does, from data files."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sglang_parse.cli.estimate import CARDS, ModelShape, PairTimes
from sglang_parse.verify.short_passes import MOST_READ

DATA = Path(__file__).parent / "data"
# The largest batch for which SGLang captures a decode step. SGLang takes the limit of
# running requests, which is 48 by default. A pass without verdicts is a captured decode
# step if it has at most this many rows.
CAPTURED_ROWS = 48


class Costs(Protocol):
    """Milliseconds. bs: requests that take part."""

    @property
    def name(self) -> str:
        """Of the pair and the machine."""

    def plain_ms(self, bs: int) -> float:
        """A decode step of the target."""

    def step_ms(self, bs: int) -> float:
        """A decode step of the draft model."""

    def catch_up_ms(self, num_tokens: int, bs: int) -> float:
        """The draft model forwards committed tokens that its KV lacks."""

    def pass_ms(self, rows: int, bs: int, *, asks: bool = True) -> float:
        """A verify pass of the target. asks: whether it holds verdicts."""

    def prefill_ms(self, num_tokens: int) -> float:
        """The target computes prompts."""

    def host_ms(self, bs: int) -> float:
        """Python and launches of a drafted round that nothing hides."""

    @property
    def draft_host_ms(self) -> float:
        """What a draft phase takes beside its steps."""

    @property
    def plain_host_ms(self) -> float:
        """The same of a round of decode steps. Stock SGLang hides it."""

    @property
    def between_ms(self) -> float:
        """The scheduler's, from one round to the next. Stock SGLang hides it."""

    def head_step_ms(self, bs: int) -> float:
        """A step of the head, its reading of the pass spread over the steps."""


def load_device(name: str) -> dict[str, float]:
    """A card that `sglang-parse estimate` knows, with what the simulator alone needs.

    Raises ValueError for an unknown name.
    """
    return CARDS[name] | constants(name, folder="devices")


def constants(name: str, *, folder: str) -> dict[str, float]:
    """The values of a data file, their sources left out."""
    known = sorted(p.stem for p in (DATA / folder).glob("*.json"))
    if name not in known:
        raise ValueError(f"{name!r} is not known; expected one of {', '.join(known)}.")
    return values_of(DATA / folder / f"{name}.json")


def values_of(path: Path, part: str = "constants") -> dict[str, float]:
    """The same of a file anywhere, and of any part of it."""
    text = path.read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)[part]
    return {key: row["value"] for key, row in table.items()}


@dataclass(frozen=True)
class GpuCosts(PairTimes):
    """Modelled from the shapes of a pair: what its memory and its arithmetic take.

    card: of `load_device`. graphs: whether verify passes and the draft's catching up
    replay graphs. ships_head: whether the target's head is its own MTP head, and no
    EAGLE-3 head. short_passes: whether passes without verdicts are captured decode
    steps where they fit.
    """

    graphs: bool = True
    name: str = ""
    ships_head: bool = False
    short_passes: bool = True

    def plain_ms(self, bs: int) -> float:
        return self.decode_ms(self.target, bs)

    def step_ms(self, bs: int) -> float:
        return self.decode_ms(self.draft, bs) + self.card["step_extra_ms"]

    def catch_up_ms(self, num_tokens: int, bs: int) -> float:
        gpu = self.forward_ms(self.draft, num_tokens, bs)
        return max(gpu, self._launch_ms(self.draft, graphs=False))

    def pass_ms(self, rows: int, bs: int, *, asks: bool = True) -> float:
        read = (rows - bs) * self.context * self.target.kv_bytes / self.tp
        is_short = not asks and rows <= CAPTURED_ROWS and read <= MOST_READ
        if is_short and self.graphs and self.short_passes:
            return self.decode_ms(self.target, rows)
        gpu = self.forward_ms(self.target, rows, bs)
        return max(gpu, self._launch_ms(self.target, graphs=self.graphs))

    def prefill_ms(self, num_tokens: int) -> float:
        return self.forward_ms(self.target, num_tokens, 1)

    def host_ms(self, bs: int) -> float:
        return self.card["host_round_ms"] + self.card["host_request_ms"] * bs

    @property
    def draft_host_ms(self) -> float:
        return self.card["host_draft_ms"]

    @property
    def plain_host_ms(self) -> float:
        return self.card["host_plain_ms"]

    @property
    def between_ms(self) -> float:
        return self.card["host_between_ms"]

    def head_step_ms(self, bs: int) -> float:
        if self.ships_head:
            # One layer more and the LM head: what many models ship to draft.
            head = replace(self.target, layers=1)
            step = self.decode_ms(head, bs) + self.card["step_extra_ms"]
            least = 0.0 if self.graphs else self._launch_ms(head, graphs=False)
            return max(step, least)
        return self.card["head_step_ms"] * (1.0 if not self.graphs else 0.3)

    def _launch_ms(self, model: ModelShape, *, graphs: bool) -> float:
        card = self.card
        dense = card["graph_layer_ms" if graphs else "eager_layer_ms"]
        moe = card["graph_moe_layer_ms" if graphs else "eager_moe_layer_ms"]
        return model.layers * (moe if model.experts else dense) + 1.5


@dataclass(frozen=True)
class MeasuredCosts:
    """Straight lines through measured times, in which nothing is hidden."""

    plain_base: float
    plain_request: float
    step_base: float
    step_request: float
    catch_up_base: float
    catch_up_token: float
    pass_base: float
    pass_row: float
    prefill_base: float
    prefill_token: float
    host_base: float
    host_request: float
    head_base: float
    between: float = 0.0
    name: str = "measured"

    @classmethod
    def load(cls, name: str) -> MeasuredCosts:
        """By the name of its data file. Raises ValueError for an unknown one."""
        return cls(**constants(name, folder="measured"), name=name)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> MeasuredCosts:
        """A table that `benchmarks.simulate.measure` has written."""
        return cls(**values_of(path))  # type: ignore[arg-type]

    def plain_ms(self, bs: int) -> float:
        return self.plain_base + self.plain_request * bs

    def step_ms(self, bs: int) -> float:
        return self.step_base + self.step_request * bs

    def catch_up_ms(self, num_tokens: int, bs: int) -> float:
        return self.catch_up_token * num_tokens

    def pass_ms(self, rows: int, bs: int, *, asks: bool = True) -> float:
        return self.pass_base + self.pass_row * rows

    def prefill_ms(self, num_tokens: int) -> float:
        return self.prefill_base + self.prefill_token * num_tokens

    def host_ms(self, bs: int) -> float:
        return self.host_base + self.host_request * bs

    @property
    def draft_host_ms(self) -> float:
        return max(0.0, self.catch_up_base - self.step_base)

    @property
    def plain_host_ms(self) -> float:
        return 0.0  # part of the step, which the target alone takes as well

    @property
    def between_ms(self) -> float:
        return self.between

    def head_step_ms(self, bs: int) -> float:
        return self.head_base
