"""Gated delta nets in chunks equal the same token by token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_parse.recurrent.gated_delta import (
    CHUNK,
    LinearInputs,
    LinearState,
    pad_rows,
    run_layer,
    take_rows,
)
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
# The share of the largest value that half precision costs.
HALF = 3e-3
ROOT = Path(__file__).parents[3]


def random_inputs(lens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = (WIDTH, VALUE_HEADS, VALUE_HEADS)
    rows = [torch.randn(sum(lens), n, generator=generator) for n in shapes]
    return LinearInputs(*rows, tuple(lens))


def random_states(num, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return LinearState(
        torch.randn(num, WIDTH, KERNEL - 1, generator=generator),
        torch.randn(num, VALUE_HEADS, VALUE, KEY, generator=generator),
    )


@pytest.mark.parametrize("lens", [(1,), (1, 1), (3, 3), (5, 1, 70), (2 * CHUNK, CHUNK)])
def test_chunks_equal_tokens_one_by_one(lens):
    """Red if a token sees a later one, another sequence or padding, or a chunk begins
    with a wrong state: outputs, and states at all places."""
    layer, inputs, start = random_layer(), random_inputs(lens), random_states(len(lens))
    places = [(i, n) for i, length in enumerate(lens) for n in range(length + 1)]
    out, ends = run_layer(layer, inputs, start, places)
    first = 0
    for i, length in enumerate(lens):
        rows = slice(first, first + length)
        expected, states = run_token_by_token(
            layer,
            *(t[rows] for t in (inputs.qkv, inputs.a, inputs.b)),
            start.conv[i],
            start.delta[i],
        )
        torch.testing.assert_close(out[rows], expected, atol=SAME, rtol=SAME)
        for at, (j, n) in enumerate(places):
            if j == i:
                conv, delta = states[n]
                torch.testing.assert_close(ends.conv[at], conv, atol=0, rtol=0)
                torch.testing.assert_close(ends.delta[at], delta, atol=SAME, rtol=SAME)
        first += length


def test_a_sequence_may_be_cut_anywhere():
    """Red if what is computed in two goes differs from one: chunked prefill."""
    layer, inputs, start = random_layer(), random_inputs((90,)), random_states(1)
    out, ends = run_layer(layer, inputs, start, [(0, 90)])
    for cut in (1, 2, 64, 89):
        first, middle = run_layer(layer, inputs.leading([cut]), start, [(0, cut)])
        rest = LinearInputs.of(
            torch.arange(cut, 90), [90 - cut], inputs.qkv, inputs.a, inputs.b
        )
        second, last = run_layer(layer, rest, middle, [(0, 90 - cut)])
        torch.testing.assert_close(
            torch.cat([first, second]), out, atol=SAME, rtol=SAME
        )
        torch.testing.assert_close(last.delta, ends.delta, atol=SAME, rtol=SAME)
        torch.testing.assert_close(last.conv, ends.conv, atol=0, rtol=0)


def test_strong_decays_do_not_overflow():
    """Red if a decay between two tokens is a quotient of two products: exp(800)."""
    layer, inputs = random_layer(), random_inputs((CHUNK,))
    layer.A_log = torch.full((VALUE_HEADS,), 5.0)
    layer.dt_bias = torch.zeros(VALUE_HEADS)
    out, ends = run_layer(layer, inputs, random_states(1), [(0, CHUNK)])
    assert out.isfinite().all() and ends.delta.isfinite().all()


def test_leading_rows_are_those_of_each_sequence():
    """Red if a request that keeps nothing shifts the rows of the next one."""
    inputs = random_inputs((3, 2, 4))
    kept = inputs.leading([2, 0, 3])
    assert kept.lens == (2, 3)
    rows = torch.tensor([0, 1, 5, 6, 7])
    assert kept.qkv.equal(inputs.qkv[rows]) and kept.b.equal(inputs.b[rows])


@pytest.mark.parametrize("lens", [(2, 2), (3, 1, 2)])
def test_padding_is_taken_off_again(lens):
    """Red if a row of padding stands for a real one."""
    rows = torch.arange(sum(lens) * 2.0).view(-1, 2) + 1
    padded = pad_rows(rows, lens)
    assert padded.shape == (len(lens), max(lens), 2)
    assert int((padded == 0).sum()) == 2 * (len(lens) * max(lens) - sum(lens))
    assert take_rows(padded, lens).equal(rows)


def test_sglangs_triton_kernels_give_the_oracles_states():
    """Red if the kernels that a GPU would run need another layout of states, decays or
    heads, write states where nobody asks for it, or show them elsewhere than at every
    64 tokens. SGLang's own kernels, interpreted."""
    script = ROOT / "tests" / "support" / "triton_gated_delta.py"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    deviations = json.loads(done.stdout.splitlines()[-1])
    assert len(deviations) == 13
    assert max(deviations) < HALF
