"""What fast paths are compared with: eager prefills and decode steps of a few texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from sglang_parse.sgl.compat.graph_changes import graphs_of_pass
from sglang_parse.sgl.forward_batches import build_batch, extend_fields, mark_extend
from sglang_parse.sgl.upload import upload

# Tokens of the texts. They fill pages and blocks of kernels partly, and exactly.
LENGTHS = (9, 33, 64, 130)
# Last tokens of each text, which the path that is tried computes.
TAIL = 4
# Columns of a row behind its text.
SPARE = 8
# A path may differ by so many times the noise, and by this more, in shares of the
# spread of the logits. Above the largest noise nothing can be told.
NOISE_TIMES, LEAST_ALLOWED, MOST_NOISE = 4.0, 1e-3, 0.1

#: One step of a path: tokens, rows of req_to_token, and lengths before them -> logits.
Step = Callable[[Sequence[int], Tensor, Sequence[int]], Tensor]


class ReferenceFailed(RuntimeError):
    """The plain path does not run here, or differs from itself."""


@dataclass(frozen=True)
class ProbeRows:
    """Texts of random tokens, their rows of `table`, and slots that no row names."""

    texts: list[list[int]]
    rows: Tensor
    table: Tensor
    scratch: Tensor
    #: The token behind each text, and others in place of its last ones.
    behind: list[int]
    wrong: list[list[int]]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lens(self) -> list[int]:
        """Tokens before the tail of each text."""
        return [len(text) - TAIL for text in self.texts]


@contextmanager
def borrowed_rows(runner: Any, *, num_scratch: int = 0) -> Iterator[ProbeRows]:
    """Rows and slots of a ModelRunner's pools, which hold no request yet.

    num_scratch: slots for each text. Raises ReferenceFailed where there is no room.
    """
    pool, allocator = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    table, page = pool.req_to_token, int(allocator.page_size)
    lengths = [n for n in LENGTHS if n + SPARE <= table.shape[1]][: pool.size]
    widths = [-(-(n + SPARE) // page) * page for n in lengths]
    more = -(-num_scratch * len(lengths) // page) * page
    total = sum(widths) + more
    slots = allocator.alloc(total) if lengths else None
    if slots is None:
        raise ReferenceFailed(f"{total} tokens do not fit into the KV pool")
    kept = table[1 : 1 + len(lengths)].clone()
    try:
        parts = slots.split([*widths, more])
        for row, part in enumerate(parts[:-1], 1):
            width = min(len(part), table.shape[1])
            table[row, :width] = part[:width].to(table.dtype)
        draw = torch.Generator().manual_seed(20)
        ids = partial_ids(runner.model_config.vocab_size, draw)
        yield ProbeRows(
            [ids(n) for n in lengths],
            torch.arange(1, 1 + len(lengths), device=table.device),
            table,
            parts[-1][: num_scratch * len(lengths)].to(torch.int64),
            ids(len(lengths)),
            [ids(TAIL + 2) for _ in lengths],
        )
    finally:
        table[1 : 1 + len(lengths)] = kept
        allocator.free(slots)


def partial_ids(vocab_size: int, draw: torch.Generator) -> Callable[[int], list[int]]:
    """(number of tokens) -> random ids."""

    def ids(num: int) -> list[int]:
        found: list[int] = torch.randint(vocab_size, (num,), generator=draw).tolist()
        return found

    return ids


class PlainPath:
    """Forwards of a runner without any graph. scope: what they run in."""

    def __init__(
        self,
        runner: Any,
        probe: ProbeRows,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.runner, self.probe, self.scope = runner, probe, scope

    def prefill(
        self, texts: Sequence[Sequence[int]], index: Sequence[int] | None = None
    ) -> Tensor:
        """[texts, vocab] behind each text, which fills row `index` from its start."""
        index = range(len(texts)) if index is None else index
        lens, starts = [len(text) for text in texts], [0] * len(texts)
        rows, table = self.probe.rows[list(index)], self.probe.table
        ids = [token for text in texts for token in text]
        fields = extend_fields(ids, rows, starts, lens, table)
        batch = self._batch(ForwardMode.EXTEND, **fields)
        mark_extend(batch, starts, lens)
        return self._forward(batch)

    def step(self, ids: Sequence[int], rows: Tensor, lens: Sequence[int]) -> Tensor:
        """[rows, vocab] behind one more token of each row."""
        device = rows.device
        on_host = torch.tensor(lens)
        at = upload(on_host, device)
        batch = self._batch(
            ForwardMode.DECODE,
            input_ids=upload(ids, device),
            rows=rows,
            positions=at,
            out_cache_loc=self.probe.table[rows, at].to(torch.int64),
            seq_lens=at + 1,
            seq_lens_cpu=on_host + 1,
        )
        return self._forward(batch)

    def _batch(self, mode: ForwardMode, **fields: Tensor) -> Any:
        return build_batch(
            self.runner,
            mode,
            **fields,
            capture=CaptureHiddenMode.NULL,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )

    def _forward(self, batch: Any) -> Tensor:
        with self.scope(), graphs_of_pass(self.runner):
            output = self.runner.forward(batch).logits_output
        return kept(output.next_token_logits)


class Reference:
    """Plain logits behind each of the last tokens of the texts, and their noise."""

    def __init__(self, plain: PlainPath) -> None:
        """Raises ReferenceFailed where the plain path is no measure."""
        self.plain, self.probe = plain, plain.probe
        texts = self.probe.texts
        try:
            heads = [[t[: len(t) - TAIL + 1 + j] for t in texts] for j in range(TAIL)]
            self.behind = [plain.prefill(head) for head in heads]
            longer = [[*t, x] for t, x in zip(texts, self.probe.behind, strict=True)]
            self.beyond = plain.prefill(longer)
            one = [plain.prefill([t], [i]) for i, t in enumerate(texts)]
            self.noise = max(
                difference(torch.cat(one), self.behind[-1]),
                self.of_steps(plain.step, range(len(texts))),
            )
        except Exception as error:
            raise ReferenceFailed(f"plain forwards raised {error!r}") from error
        if self.noise > MOST_NOISE:
            raise ReferenceFailed(
                f"plain prefills and steps differ by {self.noise:.2g} of the logits' "
                f"spread (at most {MOST_NOISE:g})"
            )

    @property
    def allowed(self) -> float:
        return NOISE_TIMES * self.noise + LEAST_ALLOWED

    def spoil(self) -> None:
        """Write the texts' KV, and wrong KV in place of the tails and behind them."""
        pairs = zip(self.probe.texts, self.probe.wrong, strict=True)
        self.plain.prefill([[*text[:-TAIL], *wrong] for text, wrong in pairs])

    def of_steps(self, step: Step, index: Sequence[int]) -> float:
        """How far a path that decodes the tails, step by step, lies from the plain one.

        index: of the texts, one for each row of a step; texts may repeat.
        """
        self.spoil()
        chosen = list(index)
        rows, found = self.probe.rows[chosen], []
        for j in range(TAIL):
            ids = [self.probe.texts[i][j - TAIL] for i in chosen]
            lens = [self.probe.lens[i] + j for i in chosen]
            found.append((kept(step(ids, rows, lens)), self.behind[j][chosen]))
        return max(*(difference(a, b) for a, b in found), self.of_kv(chosen))

    def of_kv(self, index: Sequence[int]) -> float:
        """How far a plain step lies off that reads the KV of the tails."""
        chosen = sorted(set(index))
        lens = [len(self.probe.texts[i]) for i in chosen]
        ids = [self.probe.behind[i] for i in chosen]
        found = self.plain.step(ids, self.probe.rows[chosen], lens)
        return difference(found, self.beyond[chosen])


def kept(logits: Tensor) -> Tensor:
    """A copy that no later forward writes into."""
    return logits.float().clone()


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of a row, root mean square, as a share of the row's own
    spread; infinite where a number is none."""
    width = min(found.shape[-1], wanted.shape[-1])
    a, b = (t[..., :width].float().clamp(-1e4, 1e4) for t in (found, wanted))
    off = (a - b).square().mean(-1).sqrt() / b.std(-1).clamp_min(1e-6)
    worst = float(off.max())
    return worst if worst == worst else float("inf")
