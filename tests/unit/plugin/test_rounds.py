"""When the target may write several tokens before the scheduler is asked again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.plugin.rounds import may_repeat
from tests.support.fake_batch import plain_sampling


def batch(*, grammar=None, session=None, hidden=False, required=False, **info):
    """A batch of two requests, the second with a grammar or a session."""
    penalizer = SimpleNamespace(is_required=required)
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(grammar=None, session=None),
            SimpleNamespace(grammar=grammar, session=session),
        ],
        return_hidden_states=hidden,
        sampling_info=plain_sampling(9, **{"penalizer_orchestrator": penalizer} | info),
    )


@pytest.mark.parametrize("has_state", [False, True])
def test_plain_requests_may(has_state):
    """Red if steps in a row are never taken."""
    assert may_repeat(batch(), has_state=has_state)


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
    assert not may_repeat(batch(**more), has_state=False)


def test_a_session_goes_on_from_a_recurrent_state():
    """Red if its next turn begins behind what was written after the answer's end."""
    one = batch(session="s")
    assert may_repeat(one, has_state=False) and not may_repeat(one, has_state=True)
