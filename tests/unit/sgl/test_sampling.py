"""Rows of SGLang's sampling state, and requests of its batch."""

from types import SimpleNamespace

import torch

from sglang_parse.sgl import views
from sglang_parse.sgl.sampling import token_needs
from sglang_parse.sgl.views import batch_view


def test_needs_follow_the_rows():
    """Red if a row gets the logprob settings of another request."""
    batch = SimpleNamespace(
        return_logprob=True,
        top_logprobs_nums=[0, 5],
        token_ids_logprobs=[None, [3, 4]],
    )
    needs = token_needs(batch, [1, 1, 0])
    assert needs.top_logprobs_nums == [5, 5, 0]
    assert needs.token_ids_logprobs == [[3, 4], [3, 4], None]
    batch.return_logprob = False
    assert not token_needs(batch, [0]).return_logprob


def test_view_of_some_requests_keeps_what_belongs_to_them(monkeypatch):
    """Red if a request beside one that waits is sampled, or told logprobs, as its
    neighbour."""
    monkeypatch.setattr(views, "expand_rows", lambda info, rows, _: [*rows])
    batch = SimpleNamespace(
        reqs=["a", "b", "c"],
        req_pool_indices=torch.tensor([7, 8, 9]),
        req_pool_indices_cpu=torch.tensor([7, 8, 9]),
        seq_lens=torch.tensor([1, 2, 3]),
        seq_lens_cpu=torch.tensor([1, 2, 3]),
        sampling_info=None,
        tree_cache="tree",
        device="cpu",
        return_logprob=True,
        top_logprobs_nums=[4, 5, 6],
        token_ids_logprobs=[None, [1], None],
        return_hidden_states=True,
    )
    assert batch_view(batch, [0, 1, 2]) is batch
    view = batch_view(batch, [0, 2])
    assert view.reqs == ["a", "c"] and view.sampling_info == [0, 2]
    assert view.req_pool_indices.tolist() == [7, 9]
    assert view.req_pool_indices_cpu.tolist() == [7, 9]
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [1, 3]
    assert view.top_logprobs_nums == [4, 6]
    assert view.token_ids_logprobs == [None, None]
    assert view.return_hidden_states and view.return_logprob
    batch.return_logprob, batch.top_logprobs_nums = False, None
    assert batch_view(batch, [1]).top_logprobs_nums is None
