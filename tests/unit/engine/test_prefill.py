"""When the target computes a prefill whose tokens a pass computes again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.engine.prefill import PrefillEngine


def needed(*, num_computed: int = 1, judged: int = 1, **more) -> bool:
    """Whether SGLang's prefill runs for two requests, of which so many bring a text."""
    told: list[bool] = []

    def prefill(batch, *, needed):
        told.append(needed)
        return SimpleNamespace(next_token_ids=torch.zeros(2)), None

    quiet = SimpleNamespace(
        before_prefill=lambda prefill: None, after_prefill=lambda *_: None
    )
    engine = PrefillEngine(
        target=SimpleNamespace(prefill=prefill),
        drafters=quiet,
        client_pass=SimpleNamespace(begin=lambda prefill: []),
        **more,
    )
    requests = [
        SimpleNamespace(num_computed=num_computed, has_text=i < judged)
        for i in range(2)
    ]
    batch = SimpleNamespace(return_logprob=False, return_hidden_states=False)
    engine.run(SimpleNamespace(batch=batch, requests=requests))
    return told[0]


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        ({"judged": 2}, False),
        ({"judged": 1}, True),
        ({"judged": 2, "num_computed": 2}, True),
        ({"judged": 2, "brings_back": True}, True),
    ],
)
def test_a_prefill_runs_where_no_pass_does_its_work(case, runs):
    """Red if a prompt's last token is computed twice for nothing, if a request is left
    out, or if a pass does not wait for a prompt that is on its way back."""
    assert needed(**case) is runs
