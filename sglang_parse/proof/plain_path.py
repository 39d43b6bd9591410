"""What fast paths are compared with: eager prefills and decode steps of a few texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
# Last tokens of each text, which the path that is tried computes, and columns behind.
TAIL, SPARE = 4, 8
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
    #: The tokens behind each text, and others in place of its last ones.
    behind: list[int]
    wrong: list[list[int]]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lens(self) -> list[int]:
        """Tokens before the tail of each text."""
        return [len(text) - TAIL for text in self.texts]


def lengths_for(runner: Any) -> tuple[int, ...]:
    """Tokens of the texts; one text is so long that an index leaves tokens out."""
    kept = getattr(runner.model_config.hf_config, "index_topk", None)
    return (kept + max(LENGTHS), *LENGTHS) if kept else LENGTHS


@contextmanager
def borrowed_rows(runner: Any, num_scratch: int) -> Iterator[ProbeRows]:
    """Rows and slots of a ModelRunner's pools, which hold no request yet.

    num_scratch: slots for each text. Raises ReferenceFailed where there is no room.
    """
    pool, allocator = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    table, page = pool.req_to_token, int(allocator.page_size)
    lengths = [n for n in lengths_for(runner) if n + SPARE <= table.shape[1]]
    lengths = lengths[: pool.size]
    num, vocab_size = len(lengths), runner.model_config.vocab_size
    widths = [n + SPARE for n in lengths]
    sizes = [-(-n // page) * page for n in (*widths, num_scratch * num)]
    slots = allocator.alloc(sum(sizes)) if num else None
    if slots is None:
        raise ReferenceFailed(f"{sum(sizes)} tokens do not fit into the KV pool")
    draw = torch.Generator().manual_seed(20)
    before = table[1 : 1 + num].clone()
    try:
        *parts, scratch = slots.split(sizes)
        for row, (part, width) in enumerate(zip(parts, widths, strict=True), 1):
            table[row, :width] = part[:width].to(table.dtype)
        ids = [
            torch.randint(vocab_size, (n,), generator=draw).tolist()
            for n in (*lengths, num, *[TAIL + 2] * num)
        ]
        yield ProbeRows(
            ids[:num],
            torch.arange(1, 1 + num, device=table.device),
            table,
            scratch[: num_scratch * num].to(torch.int64),
            ids[num],
            ids[num + 1 :],
        )
    finally:
        table[1 : 1 + num] = before
        allocator.free(slots)


class Reference:
    """Forwards of a runner without any graph, and their logits behind each of the last
    tokens of the texts."""

    def __init__(self, runner: Any, probe: ProbeRows, scope: Callable[[], Any]) -> None:
        """scope: what forwards run in. Raises ReferenceFailed where the plain path is
        no measure."""
        self.runner, self.probe, self.scope = runner, probe, scope
        texts = probe.texts
        try:
            heads = [[t[: len(t) - TAIL + 1 + j] for t in texts] for j in range(TAIL)]
            self.behind = [self.prefill(head) for head in heads]
            longer = [[*t, x] for t, x in zip(texts, probe.behind, strict=True)]
            self.beyond = self.prefill(longer)
            one = [self.prefill([t], [i]) for i, t in enumerate(texts)]
            alone = difference(torch.cat(one), self.behind[-1])
            #: How far it differs from itself.
            self.noise = max(alone, self.of_steps(self.step, range(len(texts))))
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

    def stepped(self, index: Sequence[int]) -> list[Tensor]:
        """[texts, vocab] behind each token of the tails of these texts and the one
        after, by a plain step for each."""
        self.spoil()
        return [self.next_step(index, j) for j in range(TAIL + 1)]

    def next_step(self, index: Sequence[int], j: int) -> Tensor:
        """The plain step of `stepped` that reads token j."""
        texts = [[*self.probe.texts[i], self.probe.behind[i]] for i in index]
        lens = [len(text) - TAIL - 1 + j for text in texts]
        ids = [text[n] for text, n in zip(texts, lens, strict=True)]
        return self.step(ids, self.probe.rows[list(index)], lens)

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
        on_host = torch.tensor(lens)
        at = upload(on_host, rows.device)
        batch = self._batch(
            ForwardMode.DECODE,
            input_ids=upload(ids, rows.device),
            rows=rows,
            positions=at,
            out_cache_loc=self.probe.table[rows, at].to(torch.int64),
            seq_lens=at + 1,
            seq_lens_cpu=on_host + 1,
        )
        return self._forward(batch)

    def _batch(self, mode: ForwardMode, **fields: Tensor) -> Any:
        null, none = CaptureHiddenMode.NULL, SpeculativeAlgorithm.NONE
        return build_batch(
            self.runner, mode, **fields, capture=null, spec_algorithm=none
        )

    def _forward(self, batch: Any) -> Tensor:
        with self.scope(), graphs_of_pass(self.runner):
            return kept(self.runner.forward(batch).logits_output.next_token_logits)

    # -- What a path is measured by --------------------------------------------

    def spoil(self) -> None:
        """Write the texts' KV, and wrong KV in place of the tails and behind them."""
        pairs = zip(self.probe.texts, self.probe.wrong, strict=True)
        self.prefill([[*text[:-TAIL], *wrong] for text, wrong in pairs])

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
        found = self.step(ids, self.probe.rows[chosen], lens)
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
