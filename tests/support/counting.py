"""A draft model and a head whose next token is the last one plus one.

Their forwards are replaced; each keeps every batch that it was asked to run.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_parse.drafting.draft_model import DraftModel
from sglang_parse.drafting.head_graphs import HeadGraphs
from sglang_parse.drafting.head_model import HeadModel
from sglang_parse.options.table import EAGLE3

VOCAB = 64
GREEDY = SimpleNamespace(is_all_greedy=True, grammars=None)


class CountingDraft(DraftModel):
    def __init__(self, vocab_size: int = VOCAB, longest_extend: int = 100) -> None:
        self.layout = None
        self.vocab_size = vocab_size
        self.num_embeddings = VOCAB
        self.unshared: frozenset[int] = frozenset()
        self.longest_extend = longest_extend
        self.runner = SimpleNamespace(decode_cuda_graph_runner=None, device="cpu")
        self.batches: list[SimpleNamespace] = []

    def _forward_batch(self, mode, **fields) -> SimpleNamespace:
        return SimpleNamespace(mode=mode, **fields)

    def _forward(self, batch: SimpleNamespace, path: str = "") -> SimpleNamespace:
        self.batches.append(batch)
        last = batch.input_ids
        if batch.mode.is_extend():
            last = batch.input_ids[torch.cumsum(batch.extend_seq_lens, 0) - 1]
        logits = torch.zeros(len(batch.rows), VOCAB)
        logits[torch.arange(len(batch.rows)), (last + 1) % VOCAB] = 1.0
        return SimpleNamespace(next_token_logits=logits)


class CountingHead(HeadModel):
    """Its hidden state is the sum of the one it reads and the token."""

    name = EAGLE3

    def __init__(self) -> None:
        self.hot_token_id = None
        self.layout = None
        self.longest_prefill = 8
        self.runner = SimpleNamespace(dtype=torch.float32, device="cpu")
        self.graphs = HeadGraphs(self.runner, 1, self.name)
        self.batches: list[SimpleNamespace] = []

    def _forward_batch(self, mode, **fields) -> SimpleNamespace:
        return SimpleNamespace(mode=mode, **fields)

    def _forward(self, batch: SimpleNamespace, path: str = "") -> SimpleNamespace:
        self.batches.append(batch)
        last = torch.arange(len(batch.rows))
        if batch.mode.is_extend():
            last = torch.cumsum(batch.extend_seq_lens, 0) - 1
        tokens = batch.input_ids[last]
        logits = torch.zeros(len(batch.rows), VOCAB)
        logits[torch.arange(len(batch.rows)), (tokens + 1) % VOCAB] = 1.0
        hidden = batch.spec_info.hidden_states[last, :1] + tokens[:, None]
        return SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
