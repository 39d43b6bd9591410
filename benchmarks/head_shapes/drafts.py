"""What an EAGLE-3 head drafts behind every token of a text, as chains and as trees.

All places of a text are drafted from at once. A drafted row sees the text's rows up to
its place, as the head followed them, and the drafted rows on its own path.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.train_pair.head import Eagle3Head, causal
from benchmarks.train_pair.model import HEAD_DIM, THETA, rms_norm, rotate

# Other tokens of a chain's place that are looked at.
NUM_OTHERS = 7


@dataclass(frozen=True)
class Rows:
    """Rows of the head: their places in the text, hidden states, and the keys and
    values of the drafted rows in front of each, own ones included.

    place: [n] of the row's root. hidden: [n, D]. keys, values: [n, depth, heads, 64].
    """

    place: Tensor
    hidden: Tensor
    keys: Tensor
    values: Tensor

    def at(self, index: Tensor) -> Rows:
        return Rows(*(t[index] for t in vars(self).values()))


class TextDrafts:
    """A head behind one text that its target wrote."""

    @torch.no_grad()
    def __init__(self, head: Eagle3Head, ids: Tensor, features: Tensor) -> None:
        """ids: [T]. features: [T, 3 * D]."""
        self.head, self.ids = head, ids
        self.tokens: Tensor | None = getattr(head, "tokens", None)
        sizes = getattr(head, "sizes", None)
        x = F.linear(features if sizes is None else features / sizes, head.fc)
        places = torch.arange(len(ids))
        q, self.keys, self.values = self._qkv(ids.roll(-1), x, places)
        scores = torch.einsum("thd,shd->hts", q, self.keys) * HEAD_DIM**-0.5
        seen = (scores + causal(len(ids), len(ids), 0)).softmax(-1)
        attended = torch.einsum("hts,shd->thd", seen, self.values)
        empty = self.keys.new_empty(len(ids), 0, *self.keys.shape[1:])
        self.roots = Rows(places, self._behind(x, attended), empty, empty)

    def log_probs(self, rows: Rows) -> Tensor:
        """[n, draft vocab] of the token behind each row."""
        return self.head.logits(rows.hidden).log_softmax(-1)

    def names(self, choices: Tensor) -> Tensor:
        """Tokens of the target for columns of `log_probs`."""
        return choices if self.tokens is None else self.tokens[choices]

    @torch.no_grad()
    def step(self, rows: Rows, tokens: Tensor) -> Rows:
        """The rows of `tokens`, [n], drafted behind `rows`."""
        depth = rows.keys.shape[1] + 1
        q, k, v = self._qkv(tokens, rows.hidden, rows.place + depth)
        keys = torch.cat([rows.keys, k[:, None]], 1)
        values = torch.cat([rows.values, v[:, None]], 1)
        text = torch.einsum("nhd,shd->nhs", q, self.keys)
        hidden = torch.arange(len(self.ids)) > rows.place[:, None]
        text = text.masked_fill(hidden[:, None], -torch.inf)
        own = torch.einsum("nhd,nlhd->nhl", q, keys)
        seen = (torch.cat([text, own], -1) * HEAD_DIM**-0.5).softmax(-1)
        seen, own = seen.split([len(self.ids), depth], -1)
        attended = torch.einsum("nhs,shd->nhd", seen, self.values)
        attended = attended + torch.einsum("nhl,nlhd->nhd", own, values)
        return Rows(rows.place, self._behind(rows.hidden, attended), keys, values)

    def _qkv(self, tokens: Tensor, hidden: Tensor, places: Tensor) -> list[Tensor]:
        """[n, heads, 64] each; tokens and hidden states behind `places`."""
        head = self.head
        embeds = rms_norm(F.embedding(tokens, head.embed), head.norm1[0])
        both = torch.cat([embeds, rms_norm(hidden, head.hidden_norm)], -1)
        q, k, v = F.linear(both, head.wqkv[0]).unflatten(-1, (-1, HEAD_DIM)).chunk(3, 1)
        angle = places[:, None, None] * THETA ** (
            -torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        )
        q, k = (rotate(t, angle.cos(), angle.sin()) for t in (q, k))
        return [q, k, v]

    def _behind(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The row's output: what the layer makes of its input and its attention."""
        head = self.head
        x = hidden + F.linear(attended.flatten(1), head.wo[0])
        gate, up = F.linear(rms_norm(x, head.norm2[0]), head.wgu[0]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, head.wd[0])


@dataclass(frozen=True)
class Chains:
    """The likeliest token again and again, behind each place of a text.

    right: [T, most] whether this token and all before it are the text's. sums: [T,
    most] log-probability of the chain up to this token. others: [T, most,
    NUM_OTHERS] that of the chain before this place and another token in it, the next
    likeliest first. own: [T, most] that of the others which is the text's, -inf where
    none is.
    """

    right: Tensor
    sums: Tensor
    others: Tensor
    own: Tensor

    @classmethod
    def of(cls, drafts: TextDrafts, most: int) -> Chains:
        rows, ids = drafts.roots, drafts.ids
        right, sums = torch.ones(len(ids), dtype=torch.bool), torch.zeros(len(ids))
        columns = []
        for k in range(most):
            found = drafts.log_probs(rows)
            best, choice = found.topk(min(1 + NUM_OTHERS, found.shape[1]))
            tokens, wanted = drafts.names(choice), behind(ids, 2 + k)
            others = sums[:, None] + best[:, 1:]
            is_own = right[:, None] & (tokens[:, 1:] == wanted[:, None])
            own = others.masked_fill(~is_own, -torch.inf).amax(1)
            tokens, best = tokens[:, 0], best[:, 0]
            right, sums = right & (tokens == wanted), sums + best
            columns.append((right, sums, others, own))
            if k + 1 < most:
                rows = drafts.step(rows, tokens)
        return cls(*(torch.stack(column, 1) for column in zip(*columns, strict=True)))

    def with_others(self, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
        """[T] right tokens, rows, and forwards of the head behind the first, where
        every token is shown whose path has at least this probability."""
        least = math.log(cutoff)
        shown = self.sums >= least
        shown[:, 0] = True  # it is there already
        lens = shown.sum(1)
        counts = torch.minimum(self.right.sum(1), lens)
        beside = (self.others >= least) & shown[:, :, None]
        found = (self.own >= least) & shown
        place = counts.clamp(max=shown.shape[1] - 1)[:, None]
        hit = found.gather(1, place)[:, 0] & (counts < lens)
        return counts + hit, lens + beside.sum((1, 2)), lens - 1


@dataclass(frozen=True)
class Trees:
    """The likeliest paths behind each place: each level goes on from its `width`
    likeliest rows, with `width` tokens each (arXiv:2406.16858).

    sums: [T, n] log-probability of the path to every node. own: [T, levels] that of
    the text's own path, -inf where the tree lacks it.
    """

    sums: Tensor
    own: Tensor

    @classmethod
    def of(cls, drafts: TextDrafts, width: int, levels: int) -> Trees:
        rows, ids = drafts.roots, drafts.ids
        num = len(ids)
        sums, is_own = torch.zeros(num, 1), torch.ones(num, 1, dtype=torch.bool)
        nodes, own = [], []
        for k in range(levels):
            found = drafts.log_probs(rows).unflatten(0, (num, -1))
            width = min(width, found.shape[2])
            best, choice = found.topk(width)
            tokens = drafts.names(choice)
            paths = (sums[:, :, None] + best).flatten(1)
            wanted = behind(ids, 2 + k)[:, None, None]
            on_own = (is_own[:, :, None] & (tokens == wanted)).flatten(1)
            nodes.append(paths)
            own.append(paths.masked_fill(~on_own, -torch.inf).amax(1))
            sums, kept = paths.topk(width)
            is_own = on_own.gather(1, kept)
            if k + 1 < levels:
                parents = kept // width + torch.arange(num)[:, None] * choice.shape[1]
                chosen = tokens.flatten(1).gather(1, kept)
                rows = drafts.step(rows.at(parents.flatten()), chosen.flatten())
        return cls(torch.cat(nodes, 1), torch.stack(own, 1))

    def above(self, cutoff: float) -> tuple[Tensor, Tensor]:
        """[T] right tokens and rows of the tree of all nodes of this probability."""
        least = math.log(cutoff)
        found = (self.own >= least).long().cumprod(1).sum(1)
        return found, (self.sums >= least).sum(1)

    def right(self, size: int) -> Tensor:
        """[T] right tokens of the tree of the `size` likeliest nodes."""
        least = self.sums.topk(size).values[:, -1:]
        return (self.own >= least).long().cumprod(1).sum(1)


def behind(ids: Tensor, by: int) -> Tensor:
    """[T] the token `by` places further, -1 behind the text."""
    return F.pad(ids[by:], (0, min(by, len(ids))), value=-1)
