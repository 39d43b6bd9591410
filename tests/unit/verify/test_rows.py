"""The route of backends that read rows of slots, through SGLang's own code of each."""

import pytest
import torch

from sglang_parse.verify.backends.routes import build_verify_input
from tests.support.passes import HEADS, make_pass

pytestmark = pytest.mark.usefixtures("plugins")

TOLERANCE = 1e-5  # float32, the same sums in another order


@pytest.mark.parametrize("name", ["fa3", "torch_native"])
@pytest.mark.parametrize("seed", range(6))
def test_backend_of_rows_gives_the_oracles_attention(monkeypatch, name, seed):
    """Red if a suffix's row lacks a slot, has one of a rejected draft, or its queries
    do not stand at the row's end."""
    from tests.support.row_pass import run

    case = make_pass(seed)
    result = run(name, case, monkeypatch)
    assert (result - case.oracle()).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 4, 15])
def test_window_and_sinks_of_rows_are_the_oracles(monkeypatch, window, seed):
    """Red if the window of a suffix begins elsewhere than before its own position."""
    from tests.support.row_pass import run

    case = make_pass(seed)
    sinks = torch.linspace(-1.0, 2.0, HEADS)
    result = run("fa3", case, monkeypatch, window=window, sinks=sinks)
    expected = case.oracle(window, sinks.tolist())
    assert (result - expected).abs().max() < TOLERANCE


def test_table_has_a_row_a_sequence_and_no_other_slots():
    """Red if a row is as long as another, and a backend reads on behind its end."""
    case = make_pass(5, num_requests=4)
    info = build_verify_input("rows", "fa3", case.plan, case.slots, torch.tensor([0]))
    lens = info.sequences.kv_lens
    assert info.table.shape == (len(lens), max(lens))
    assert info.table.dtype == torch.int32
    for row, num in zip(info.table.tolist(), lens, strict=True):
        assert all(row[:num]) and not any(row[num:])
    fields = info.batch_fields(torch.tensor(case.rows))
    assert fields["req_pool_indices"].tolist() == list(range(len(lens)))
    assert fields["seq_lens"].tolist() == list(lens)
