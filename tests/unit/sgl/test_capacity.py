"""Rows and bytes that a forward may take."""

from types import SimpleNamespace

import pytest

from sglang_parse.sgl import capacity

pytestmark = pytest.mark.usefixtures("plugins")


def test_features_of_a_prefill_must_fit():
    """Red if a head runs the device out of memory at the first prompt."""
    room = {"num_rows": 8192, "width": 3 * 4096, "itemsize": 2, "compose": "mtp"}
    wanted = 2 * 8192 * 3 * 4096 * 2
    capacity.check_feature_room(**room, free_bytes=wanted)
    with pytest.raises(
        ValueError, match=r"mtp needs 0\.40 GB .* 8192 .*chunked-prefill"
    ):
        capacity.check_feature_room(**room, free_bytes=wanted - 1)


@pytest.mark.parametrize(
    ("chunk", "returns_experts", "rows"),
    [(8192, False, 8192), (512, False, 2048), (512, True, 512), (-1, False, 16384)],
)
def test_a_pass_is_no_longer_than_memory_is_left_for(
    monkeypatch, chunk, returns_experts, rows
):
    """Red if a pass outgrows the activations of a prefill, or SGLang's buffer of routed
    experts, which has rows for a prefill alone."""
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    features = SimpleNamespace(enable_return_routed_experts=returns_experts)
    execution = SimpleNamespace(features=features)
    monkeypatch.setattr(capacity, "get_schedule", lambda: schedule)
    monkeypatch.setattr(capacity, "get_exec", lambda: execution)
    assert capacity.longest_pass() == rows
