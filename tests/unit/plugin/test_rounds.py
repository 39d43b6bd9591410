"""When the target may write several tokens before the scheduler is asked again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.plugin.rounds import may_repeat
from tests.support.fake_batch import plain_sampling


def batch(*, grammar=None, hidden=False, required=False, **info):
    """A batch of two requests, the second with a grammar."""
    penalizer = SimpleNamespace(is_required=required)
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(grammar=None),
            SimpleNamespace(grammar=grammar),
        ],
        return_hidden_states=hidden,
        sampling_info=plain_sampling(9, **{"penalizer_orchestrator": penalizer} | info),
    )


def test_plain_requests_may():
    """Red if steps in a row are never taken."""
    assert may_repeat(batch())


@pytest.mark.parametrize(
    "more",
    [
        {"grammar": "a"},
        {"hidden": True},
        {"required": True},
        {"acc_additive_penalties": 1.0},
        {"acc_scaling_penalties": 1.0},
        {"has_custom_logit_processor": True},
    ],
    ids=str,
)
def test_what_follows_each_token_takes_one_step_at_a_time(more):
    """Red if the second of two tokens ignores what the first one changes."""
    assert not may_repeat(batch(**more))
