"""Grammar masks along a draft (JSON schema, regex, EBNF).

The grammar walks ahead with the draft, its mask before each draft token is kept, and
it is rewound before the scheduler advances it over the tokens that were accepted. The
draft and the target are thus masked by the same rows. A client's text, which was
not masked, is cut where the grammar does not allow it. Source of the masking calls:
sglang/srt/sampling/sampling_batch_info.py, `update_regex_vocab_mask`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from sglang.srt.constrained.base_grammar_backend import GrammarMask
from torch import Tensor

# Tokens a word of a mask, in xgrammar and llguidance.
MASK_BITS = 32


class GrammarChain:
    """One request's grammar over one round.

    masks: before each draft token and after the last one, [1, words] int32 each.
    """

    def __init__(self, grammar: Any, vocab_size: int, device: Any) -> None:
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.device = device
        self.masks = [self._fill()]
        self._num_accepted = 0

    def mask_next(self, logits: Tensor) -> None:
        """Mask logits [1, vocab] of the next draft token in place. A draft model may
        have fewer padded rows than the target, whose masks these are, and kernels
        refuse a mask wider than the logits (bitmask_ops.py)."""
        width = (logits.shape[-1] + MASK_BITS - 1) // MASK_BITS
        mask = self.masks[-1][:, :width]
        GrammarMask(self.grammar, self._on_device(mask)).apply(logits)

    @property
    def is_dead(self) -> bool:
        """Whether no token is allowed next: SGLang ends such a request."""
        return not self.masks[-1].any()

    def advance(self, token: int) -> bool:
        """Walk over a draft token that the last mask allowed. After the end of the
        grammar every token is allowed, and there is no step to go back.

        False where the draft must end before the token, because the grammar refuses it
        although its mask allows it, or because it allows nothing after it. A rule that
        never ends does both.
        """
        try:
            if not self._has_ended():
                self.grammar.accept_token(token)
                self._num_accepted += 1
            mask = self._fill()
        except ValueError:
            return False
        if mask.any():
            self.masks.append(mask)
            return True
        return False

    def walk(self, tokens: Sequence[int]) -> int:
        """Advance over tokens that were not masked. Returns how many of them the
        grammar allows before it ends."""
        for num, token in enumerate(tokens):
            if self._has_ended() or not self._allows(token):
                return num
            if not self.advance(token):
                return num
        return len(tokens)

    def rewind(self) -> None:
        """Back to where the round began. A grammar that failed for good cannot go
        there; the scheduler ends its request at the next token."""
        if self._num_accepted:
            with contextlib.suppress(ValueError):
                self.grammar.rollback(self._num_accepted)
            self._num_accepted = 0

    def _fill(self) -> Tensor:
        mask = self.grammar.allocate_vocab_mask(self.vocab_size, 1, self.device)
        if not self._has_ended():
            self.grammar.fill_vocab_mask(mask, 0)
        return mask

    def _has_ended(self) -> bool:
        return bool(self.grammar.finished or self.grammar.is_terminated())

    def _allows(self, token: int) -> bool:
        """A bit of the mask, of 32 tokens a word with the lowest bit first: a client's
        text is walked token by token, on the host."""
        word, bit = divmod(token, 32)
        mask = self.masks[-1]
        if token >= self.vocab_size or word >= mask.shape[-1]:
            return False
        return bool(int(mask[0, word]) >> bit & 1)

    def _on_device(self, mask: Tensor) -> Tensor:
        return self.grammar.move_vocab_mask(mask, self.device)


def mask_for_rows(
    chains: Sequence[GrammarChain | None],
    owner: Sequence[int],
    offset: Sequence[int],
) -> GrammarMask | None:
    """The mask of sampled rows, or None if no request has a grammar.

    owner: request of each row. offset: draft tokens before the row. Rows of requests
    without a grammar are unconstrained.
    """
    chain = next((c for c in chains if c is not None), None)
    if chain is None:
        return None
    mask = chain.grammar.allocate_vocab_mask(chain.vocab_size, len(owner), chain.device)
    for row, (i, j) in enumerate(zip(owner, offset, strict=True)):
        own = chains[i]
        if own is not None:
            mask[row] = own.masks[j][0]
    return GrammarMask(chain.grammar, chain.grammar.move_vocab_mask(mask, chain.device))
