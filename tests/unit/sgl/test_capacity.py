"""Rows and bytes that a forward may take."""

from types import SimpleNamespace

import pytest
import torch

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


def a_state_pool():
    """Two layers of 4 heads in 8 + 1 slots, as SGLang's MambaPool holds them."""
    cache = SimpleNamespace(
        conv=[torch.zeros(2, 9, 64, 3)], temporal=torch.zeros(2, 9, 4, 16, 8)
    )
    return SimpleNamespace(mamba_cache=cache, size=8)


def test_passes_beside_a_recurrent_state_have_rows_that_fit(monkeypatch, caplog):
    """Red if what a pass keeps of its rows is not bounded by memory, or the log does
    not say what it takes."""
    pool = SimpleNamespace(mamba_pool=a_state_pool())
    model = SimpleNamespace(dtype=torch.float32)
    monkeypatch.setattr(capacity, "longest_pass", lambda: 2048)
    monkeypatch.setattr(capacity, "has_recurrent_state", lambda _: False)
    assert capacity.pass_rows(model, pool, 0) == 2048
    monkeypatch.setattr(capacity, "has_recurrent_state", lambda _: True)
    caplog.set_level("INFO")
    row = 2 * (64 + 2 * 4) * 4
    assert capacity.pass_rows(model, pool, 2 * 100 * row) == 100
    assert capacity.pass_rows(model, pool, 1 << 40) == 2048
    branch = (64 * 3 + 4 * 16 * 8) * 4
    for told in (
        f"8 slots of {2 * branch} bytes",
        "at most 100 rows",
        f"keeps {row} bytes of each drafted one",
        f"each judge suffix takes {branch} bytes",
    ):
        assert told in caplog.text
