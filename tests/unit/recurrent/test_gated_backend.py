"""A verify pass of gated delta nets: branches, untouched states, kept rows again."""

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.recurrent.gated_backend import (
    Advance,
    ChainsAndSuffixes,
    GatedDeltaBackend,
)
from sglang_parse.verify.backends.mask import MaskedVerifyInput
from sglang_parse.verify.backends.virtual import VirtualVerifyInput
from sglang_parse.verify.layout import PassRequest, build_verify_plan
from tests.support.gated_delta import (
    KERNEL,
    KEY,
    VALUE,
    VALUE_HEADS,
    WIDTH,
    random_layer,
    run_token_by_token,
)

SAME = 1e-5
NUM_SLOTS = 6
#: Requests' rows of req_to_token, and the slots of their states.
ROWS, SLOTS = [3, 1, 2], {1: 5, 2: 0, 3: 2}
LAYERS = [random_layer(seed, layer_id=seed) for seed in (0, 1)]


class Pool:
    """The states of two layers in slots, as SGLang's HybridReqToTokenPool has them."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.caches = [
            SimpleNamespace(
                conv=[torch.randn(NUM_SLOTS, WIDTH, KERNEL - 1, generator=generator)],
                temporal=torch.randn(
                    NUM_SLOTS, VALUE_HEADS, VALUE, KEY, generator=generator
                ),
            )
            for _ in LAYERS
        ]

    def mamba2_layer_cache(self, layer_id):
        return self.caches[layer_id]

    def get_mamba_indices(self, rows):
        return torch.tensor([SLOTS[r] for r in rows.tolist()], dtype=torch.int32)


def a_plan():
    """Three requests: two boundaries, a chain alone, a boundary at its end."""
    return build_verify_plan(
        [
            PassRequest(9, 1, (2, 3, 4, 5), boundaries=(1, 3), suffix=(6, 7, 8)),
            PassRequest(5, 1, (2, 3)),
            PassRequest(3, 1, (2,), boundaries=(1,), suffix=(6,)),
        ]
    )


@pytest.fixture(params=[MaskedVerifyInput, VirtualVerifyInput])
def run(request):
    """A pass that has run over both layers: the backend, its pool, rows and outputs."""
    plan, pool = a_plan(), Pool()
    spec_info = request.param(plan, [torch.tensor([0])] * 3, torch.tensor([0]))
    fields = spec_info.batch_fields(torch.tensor(ROWS))
    backend = object.__new__(GatedDeltaBackend)
    backend.req_to_token_pool = pool
    before = [(c.conv[0].clone(), c.temporal.clone()) for c in pool.caches]
    backend.init_forward_metadata(
        SimpleNamespace(
            spec_info=spec_info,
            req_pool_indices=fields["req_pool_indices"],
            forward_mode=fields["forward_mode"],
        )
    )
    generator = torch.Generator().manual_seed(3)
    rows = [
        [
            torch.randn(plan.num_verify_tokens, n, generator=generator)
            for n in (WIDTH, VALUE_HEADS, VALUE_HEADS)
        ]
        for _ in LAYERS
    ]
    outputs = [
        backend.forward_extend(layer, *one)
        for layer, one in zip(LAYERS, rows, strict=True)
    ]
    return SimpleNamespace(
        plan=plan,
        pool=pool,
        before=before,
        rows=rows,
        outputs=outputs,
        advance=spec_info.advance,
    )


def test_each_suffix_goes_on_from_its_boundary(run):
    """Red if a suffix sees a draft token behind its boundary, another suffix, or the
    state of another request: every row of both routes, token by token."""
    firsts = (*run.plan.root_rows, run.plan.num_verify_tokens)
    for layer, rows, out, (conv, delta) in zip(
        LAYERS, run.rows, run.outputs, run.before, strict=True
    ):
        assert out.shape == (1, run.plan.num_verify_tokens, VALUE_HEADS, VALUE)
        for i, cuts in enumerate(run.plan.boundaries):
            slot, first = SLOTS[ROWS[i]], firsts[i]
            chain = list(range(first, first + 1 + run.plan.num_draft_tokens[i]))
            width = run.plan.suffix_lens[i]
            seen = [chain]
            for k, cut in enumerate(cuts):
                start = chain[-1] + 1 + k * width
                seen.append([*chain[: 1 + cut], *range(start, start + width)])
            for index in seen:
                expected, _ = run_token_by_token(
                    layer, *(t[index] for t in rows), conv[slot], delta[slot]
                )
                own = len(chain) if index is chain else width
                torch.testing.assert_close(
                    out[0, index[-own:]], expected[-own:], atol=SAME, rtol=SAME
                )


def test_a_pass_leaves_states_alone(run):
    """Red if a rejected token stays in a state."""
    for cache, (conv, delta) in zip(run.pool.caches, run.before, strict=True):
        assert cache.conv[0].equal(conv) and cache.temporal.equal(delta)


@pytest.mark.parametrize("kept", [(1, 1, 1), (3, 0, 2), (5, 3, 0), (0, 0, 0)])
def test_any_kept_token_can_be_reached(run, kept):
    """Red if a state is left in front of or behind the kept tokens, or that of a
    request that keeps nothing, or of nobody, changes."""
    run.advance(list(kept))
    untouched = set(range(NUM_SLOTS))
    for i, num in enumerate(kept):
        slot, first = SLOTS[ROWS[i]], run.plan.root_rows[i]
        if num:
            untouched.discard(slot)
        for layer, rows, cache, (conv, delta) in zip(
            LAYERS, run.rows, run.pool.caches, run.before, strict=True
        ):
            _, states = (
                run_token_by_token(
                    layer,
                    *(t[first : first + num] for t in rows),
                    conv[slot],
                    delta[slot],
                )
                if num
                else (None, [(conv[slot], delta[slot])])
            )
            expected = states[num]
            assert cache.conv[0][slot].equal(expected[0])
            torch.testing.assert_close(
                cache.temporal[slot], expected[1], atol=SAME, rtol=SAME
            )
    rest = sorted(untouched)
    for cache, (conv, delta) in zip(run.pool.caches, run.before, strict=True):
        assert cache.conv[0][rest].equal(conv[rest])
        assert cache.temporal[rest].equal(delta[rest])


def test_prefills_and_steps_replace_states():
    """Red if a chunk or a decode step begins with another state than the last left."""
    pool, layer = Pool(), LAYERS[0]
    backend = object.__new__(GatedDeltaBackend)
    backend.req_to_token_pool = pool
    cache = pool.caches[0]
    conv, delta = cache.conv[0].clone(), cache.temporal.clone()
    generator = torch.Generator().manual_seed(5)
    sizes = (WIDTH, VALUE_HEADS, VALUE_HEADS)
    rows = [torch.randn(6, n, generator=generator) for n in sizes]
    outputs = []
    for lens, decodes in (((3, 1), False), ((1, 1), True)):
        at = sum(map(len, outputs))
        part = [t[at : at + sum(lens)] for t in rows]
        backend.init_forward_metadata(
            SimpleNamespace(
                spec_info=None,
                req_pool_indices=torch.tensor([3, 1]),
                forward_mode=SimpleNamespace(is_decode=lambda d=decodes: d),
                extend_seq_lens_cpu=list(lens),
            )
        )
        outputs.append(backend.forward_extend(layer, *part)[0])
    out = torch.cat(outputs)
    for slot, index in ((SLOTS[3], [0, 1, 2, 4]), (SLOTS[1], [3, 5])):
        expected, states = run_token_by_token(
            layer, *(t[index] for t in rows), conv[slot], delta[slot]
        )
        torch.testing.assert_close(out[index], expected, atol=SAME, rtol=SAME)
        torch.testing.assert_close(
            cache.temporal[slot], states[-1][1], atol=SAME, rtol=SAME
        )
        assert cache.conv[0][slot].equal(states[-1][0])


def test_a_pass_without_suffixes_is_chains_alone():
    """Red if exact rounds run a second, empty call in each layer."""
    parts = ChainsAndSuffixes.of(build_verify_plan([PassRequest(4, 1, (2, 3))]))
    assert parts.chain_rows.tolist() == [0, 1, 2]
    assert parts.suffix_lens == () and list(parts.branches) == []
    Advance(slots=None)([0])  # type: ignore[arg-type]
