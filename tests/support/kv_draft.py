"""A draft model whose drafts hang on every token in its KV, and a head of it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_parse.drafting.head_model import Chain, HeadHint
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest
from sglang_parse.sgl.fast_paths import FastPaths
from tests.support.counting import VOCAB, CountingDraft

WIDTH = 400


class KvDraft(CountingDraft):
    """Its next token is a hash of all tokens before it, as its KV holds them: `next_of`
    of the text. A token whose KV is missing or of another token changes what follows.
    """

    def __init__(self, period: int) -> None:
        super().__init__()
        self.paths, self.period = FastPaths(), period
        self.kv = torch.full((8 * WIDTH,), -1)
        #: By row, the slots that a request may write.
        self.most = [WIDTH] * 8

    def next_of(self, text: list[int]) -> int:
        # Mostly a cycle, and now and then something else, by all that was read.
        if sum((i + 1) * t for i, t in enumerate(text)) % self.period == 0:
            return (3 * text[-1] + 1) % VOCAB
        return (text[-1] + 1) % 7

    def _forward(self, batch: SimpleNamespace, path: str = "") -> SimpleNamespace:
        self.batches.append(batch)
        self.kv[batch.out_cache_loc] = batch.input_ids
        places = batch.out_cache_loc.tolist()
        codes = [self.code_of(self.text_of(*divmod(at, WIDTH))) for at in places]
        logits = torch.zeros(len(batch.rows), VOCAB)
        for i, (row, num) in enumerate(zip(batch.rows, batch.seq_lens, strict=True)):
            assert num <= self.most[int(row)]
            logits[i, self.next_of(self.text_of(int(row), int(num) - 1))] = 1.0
        states = torch.tensor(codes, dtype=torch.float64)[:, None]
        return SimpleNamespace(next_token_logits=logits, hidden_states=states)

    def text_of(self, row: int, last: int) -> list[int]:
        """A request's text up to a position, as its KV holds it."""
        text: list[int] = self.kv[row * WIDTH : row * WIDTH + last + 1].tolist()
        assert -1 not in text
        return text

    @staticmethod
    def code_of(text: list[int]) -> int:
        """Its hidden state behind a text."""
        return sum((3 * i + 1) * (t + 1) for i, t in enumerate(text))


class KvHead:
    """It is right about each token with chance `right`. It checks that it is shown what
    the draft has read, and is asked to go on from there."""

    def __init__(self, draft: KvDraft, right: float) -> None:
        self.draft, self.right = draft, right
        self.draw = torch.Generator().manual_seed(5)
        #: What it has read of each row, and where it read.
        self.texts: dict[int, list[int]] = {}
        self.read: list[tuple[int, int]] = []

    def follow(self, rows, table) -> list[HeadHint]:
        for one in rows:
            assert len(one.tokens) == len(one.features)
            for k, code in enumerate(one.features[:, 0].tolist()):
                text = self.draft.text_of(one.row, one.start + k)
                assert code == self.draft.code_of(text)
                assert table[one.row, one.start + k] == one.row * WIDTH + len(text) - 1
                assert k == 0 or text[-1] == one.tokens[k - 1]
                self.texts[one.row] = [*text, one.tokens[k]]
                self.read.append((one.row, one.start + k))
        nothing = torch.zeros(())
        return [HeadHint(nothing, nothing, nothing) for _ in rows]

    def propose(self, requests, table) -> list[Chain]:
        chains = []
        for r in requests:
            text = [*self.texts[r.row]]
            assert r.position == len(text) - 1
            for _ in range(r.num_new):
                is_right = torch.rand((), generator=self.draw) < self.right
                other = int(torch.randint(VOCAB, (), generator=self.draw))
                text.append(self.draft.next_of(text) if is_right else other)
            chains.append(Chain((*text[-r.num_new :],), (0.9,) * r.num_new))
        return chains


def drafts(model: KvDraft, *, most_steps: int = 1 << 30) -> list[list[int]]:
    """Four requests that come one after the other, each drafted for in windows."""
    table = WIDTH * torch.arange(8)[:, None] + torch.arange(WIDTH)
    texts = [[(5 * i + k) % 7 for k in range(4 + i)] for i in range(4)]
    read, window = [0] * 4, 17
    goals = [len(text) + n for text, n in zip(texts, (160, 90, 120, 200), strict=True)]
    for turn in range(400):
        chosen = [i for i in range(4) if turn >= 2 * i and len(texts[i]) < goals[i]]
        if not chosen:
            break
        orders = [
            DraftRequest(
                row=i,
                tokens=texts[i],
                num_cached=read[i],
                num_new=min(window, goals[i] - len(texts[i])),
                stop_ids=frozenset({61}),
                batch_index=k,
            )
            for k, i in enumerate(chosen)
        ]
        for one in orders:
            model.most[one.row] = len(one.tokens) + one.num_new - 1
        phase = DraftPhase(most_steps=most_steps)
        found = model.propose(orders, table=table, sampling_info=None, phase=phase)
        for k, i in enumerate(chosen):
            texts[i] = [*texts[i], *found.tokens[k]]
            read[i] = min(found.num_forwarded[k], len(texts[i]) - 1)
            if found.ended[k]:
                goals[i] = len(texts[i])
    return texts
