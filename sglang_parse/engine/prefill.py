"""A prefill: the target computes prompts, and clients' texts behind them are judged."""

from __future__ import annotations

from typing import Any

from sglang_parse.drafting.drafter import Prefill
from sglang_parse.engine.failures import GuardedDrafters
from sglang_parse.engine.ports import Target, TextJudge


class PrefillEngine:
    """Runs prefills. Drafters of segments catch up when they first draft."""

    def __init__(
        self,
        *,
        target: Target,
        drafters: GuardedDrafters,
        client_pass: TextJudge,
        brings_back: bool = False,
    ) -> None:
        """brings_back: whether cached prompts may still be on their way to the device;
        SGLang's prefill waits for them."""
        self.brings_back = brings_back
        self.target = target
        self.drafters = drafters
        self.client_pass = client_pass

    def run(self, prefill: Prefill) -> Any:
        """SGLang's result, with the first tokens of texts that were kept."""
        batch = prefill.batch
        num_texts = sum(one.has_text for one in prefill.requests)
        self.drafters.before_prefill(prefill)
        # A judged text's pass begins with the prompt's last token.
        needed = (
            self.brings_back
            or num_texts < len(prefill.requests)
            or any(one.num_computed > 1 for one in prefill.requests)
            or batch.return_logprob
            or batch.return_hidden_states
        )
        result, features = self.target.prefill(batch, needed=needed)
        self.drafters.after_prefill(prefill, features, result.next_token_ids)
        for index, token in self.client_pass.begin(prefill):
            result.next_token_ids[index] = token
        return result
