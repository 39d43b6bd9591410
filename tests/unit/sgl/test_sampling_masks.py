"""What tokens are drawn from, from the rows of several calls to those of a step."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import SamplingMaskOutput

from sglang_parse.sgl.sampling_masks import empty_rows, join, lay_out, spread


def support(*rows, with_logprobs=()):
    """As SGLang's sampler leaves it: rows of those who asked, padded to one width."""
    width = max(map(len, rows))
    ids = torch.tensor([[*r, *[99] * (width - len(r))] for r in rows])
    logprobs = [ids[i].float() / 10 for i in with_logprobs]
    return SamplingMaskOutput(
        token_ids=ids.to(torch.int32),
        lengths=torch.tensor([len(r) for r in rows], dtype=torch.int32),
        selected_logprobs=torch.tensor([-float(r[0]) for r in rows]),
        support_logprobs=torch.stack(logprobs) if logprobs else None,
        statuses=torch.zeros(len(rows), dtype=torch.int32),
    )


def info(*asked, support_at=None):
    at = None if support_at is None else torch.tensor(support_at)
    return SimpleNamespace(
        return_sampling_masks=list(asked), sampling_support_logprobs_capture_indices=at
    )


def ids_of(masks, request, token):
    length = int(masks.lengths[request, token])
    return masks.token_ids[request, token, :length].tolist()


def test_each_token_has_the_support_of_its_own_row():
    """Red if rows of those who did not ask, or of a call in which nobody did, move the
    supports of others."""
    first = spread(support([5], [6, 7]), info(False, True, True), "cpu")
    second = spread(None, info(False, False), "cpu")
    third = spread(support([1, 2, 3]), info(True, False), "cpu")
    masks = join([first, second, third])
    assert masks.token_ids.shape == (7, 3)
    laid = lay_out(masks, [[2, 5], [1]], [False, False])
    assert (ids_of(laid, 0, 0), ids_of(laid, 0, 1)) == ([6, 7], [1, 2, 3])
    assert ids_of(laid, 1, 0) == [5]
    assert laid.num_accept_tokens.tolist() == [2, 1]
    assert laid.selected_logprobs[0].tolist() == [-6.0, -1.0]
    assert laid.support_logprobs is None


def test_logprobs_go_to_those_who_want_them_all():
    """Red if one request is told the logprobs of another's support."""
    found = support([4, 8], [6], [2, 3], with_logprobs=(0, 2))
    masks = join([spread(found, info(True, True, True, support_at=[0, 2]), "cpu")])
    laid = lay_out(masks, [[0], [1], [2]], [True, False, True])
    assert laid.support_logprobs.shape == (2, 1, 2)
    expected = torch.tensor([[0.4, 0.8], [0.2, 0.3]])
    assert torch.equal(laid.support_logprobs[:, 0], expected)


def test_a_request_that_gets_no_token_has_an_empty_row():
    """Red if SGLang takes the worst status of no rows, which raises."""
    laid = lay_out(empty_rows(0, "cpu"), [[], []], [True, False])
    assert laid.num_accept_tokens.tolist() == [1, 1]
    assert laid.lengths.tolist() == laid.statuses.tolist() == [[0], [0]]
    assert laid.support_logprobs.shape == (1, 1, 1)
