"""What a pass of the target leaves for the later stages of the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PassOutput:
    """What one pass of the target computed."""

    #: [rows, hidden] after the final norm, None if they are not needed.
    hidden_states: Tensor | None
    #: [n, vocab] at the requested rows: the verdict rows request by request, or every
    #: row of a decode step.
    logits: Tensor
    #: [rows, width] what a head reads, None without one.
    features: Tensor | None = None
    #: [rows, width] what verdicts read of the layers, None where none does.
    layers: Tensor | None = None
    #: Whether `logits` has every row of the pass.
    has_all_logits: bool = False

    def kept(self) -> PassOutput:
        """The same with states of its own, as a captured graph's next pass writes into
        the old ones."""
        states, features = self.hidden_states, self.features
        return replace(
            self,
            hidden_states=None if states is None else states.clone(),
            features=None if features is None else features.clone(),
        )

    def states_at(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), width] what verdicts read at rows of the pass: hidden states of
        the layers shown, and the one in front of the LM head."""
        assert self.hidden_states is not None and self.layers is not None
        index = torch.tensor(rows, device=self.hidden_states.device)
        return torch.cat([self.layers[index], self.hidden_states[index]], dim=1)
