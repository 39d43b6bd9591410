"""Sampling state and request options."""

import inspect
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.usefixtures("plugins")


def test_filter_batch_repeats_and_reorders_rows():
    """Red if filter_batch starts to need unique or sorted indices."""
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_parse.sgl.sampling import expand_rows

    info = SamplingBatchInfo(
        temperatures=torch.tensor([[1.0], [2.0], [3.0]]),
        top_ps=torch.tensor([0.1, 0.2, 0.3]),
        top_ks=torch.tensor([1, 2, 3], dtype=torch.int32),
        min_ps=torch.tensor([0.0, 0.5, 0.9]),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=4,
        logit_bias=torch.eye(3, 4),
        sampling_seed=torch.tensor([7, 8, 9]),
        penalizer_orchestrator=None,
        device="cpu",
    )
    info.acc_additive_penalties = torch.arange(12.0).view(3, 4)
    rows = expand_rows(info, [2, 0, 2, 2], "cpu")
    assert rows.temperatures.flatten().tolist() == [3.0, 1.0, 3.0, 3.0]
    assert rows.top_ks.tolist() == [3, 1, 3, 3]
    assert rows.sampling_seed.tolist() == [9, 7, 9, 9]
    assert torch.equal(rows.logit_bias, torch.eye(3, 4)[[2, 0, 2, 2]])
    assert rows.acc_additive_penalties[0].tolist() == [8.0, 9.0, 10.0, 11.0]
    assert info.top_ks.tolist() == [1, 2, 3], "the batch's own record was changed"
    assert rows.penalizer_orchestrator is None
    assert len(info) == 3
    for index in ([0, 1, 2], [0, 1]):
        some = expand_rows(info, index, "cpu")
        assert some is not info and some.penalizer_orchestrator is None
        assert some.temperatures.flatten().tolist() == [k + 1.0 for k in index]
        assert len(some.acc_additive_penalties) == len(index)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_agree_on_sampled_tokens(monkeypatch, tp_size):
    """Red if ranks sample for themselves, or SGLang's sampler asks something else
    whether they have to agree: one different token and their next collective hangs."""
    import torch
    from sglang.srt.layers.sampler import Sampler

    from sglang_parse.sgl import sampling

    parallel = SimpleNamespace(tp_size=tp_size)
    monkeypatch.setattr(sampling, "get_parallel", lambda: parallel)
    seen = []

    def sampler(output, info, *_):
        seen.append(bool(info.grammars))
        return torch.zeros(1)

    info = SimpleNamespace(apply_logits_bias=lambda logits: None)
    sampling.sample_rows(
        SimpleNamespace(sampler=sampler),
        torch.zeros(1, 4),
        sampling_info=info,
        positions=torch.zeros(1),
        grammar_mask=None,
        needs=sampling.TokenNeeds(False, [0], [None]),
    )
    monkeypatch.setattr(sampling, "expand_rows", lambda *_: SimpleNamespace())
    monkeypatch.setattr(sampling.dataclasses, "replace", lambda *_, **__: None)
    seen.append(bool(sampling.draft_rows(None, [0], "cpu").grammars))
    assert seen == [tp_size > 1] * 2
    source = inspect.getsource(Sampler._sync_token_ids_across_tp)
    assert "or sampling_info.grammars:" in source


def test_a_sampled_draft_step_does_not_wait_for_the_device(monkeypatch):
    """Red if drawing a token by temperature alone makes the host wait, as
    torch.multinomial does: then no draft step runs ahead."""
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.layers import sampler

    from tests.support.device_trace import HostWaits

    assert envs.SGLANG_OPT_USE_GUMBEL_SAMPLE.get()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    drawn: list[object] = []
    monkeypatch.setattr(torch, "multinomial", lambda *a, **_: drawn.append(a))
    with HostWaits() as waits:
        probs = torch.empty(4, 100, device="cuda")
        tokens = sampler.sampling_from_probs_torch(probs)
    assert not drawn and waits.total == 0, dict(waits.counts)
    assert tokens.shape == (4,)
