"""A probe's file: what is written is read, and nothing else is."""

import pytest
import torch

from sglang_parse.judging.probe import (
    MAX_BYTES,
    Learnt,
    Point,
    Probe,
    ProbeError,
    Target,
    load_probe,
    misfit,
    save_probe,
    usual_layers,
)

LEARNT = Learnt(Target("c", "w"), "Right?", (5, 6), 0.5)


def make(inner=None, size=4, layers=(1, 2)):
    width = (len(layers) + 1) * size
    made = torch.Generator().manual_seed(1)
    num = len(inner[0]) if inner else width
    return Probe(
        LEARNT, layers, size, {"step": Point(0.4, 0.2, 0.9)},
        torch.randn(num, generator=made), torch.tensor(0.25), inner, {"auc": 0.9},
    )  # fmt: skip


@pytest.mark.parametrize("inner", [None, (torch.randn(3, 12), torch.randn(3))])
def test_a_file_holds_the_whole_probe(tmp_path, inner):
    """Red if weights, points or bindings do not come back."""
    probe = make(inner)
    save_probe(probe, tmp_path / "p")
    found = load_probe(tmp_path / "p")
    assert (found.learnt, found.layers, found.points) == (
        probe.learnt, probe.layers, probe.points,
    )  # fmt: skip
    states = torch.randn(7, 12)
    assert torch.allclose(found.scores(states), probe.scores(states))


@pytest.mark.parametrize("hidden", [False, True])
def test_scores_equal_nested_loops(hidden):
    """Red if a row or a column is taken for another."""
    inner = (torch.randn(3, 12), torch.randn(3)) if hidden else None
    probe, states = make(inner), torch.randn(5, 12)
    for row, found in zip(states.tolist(), probe.logits(states).tolist(), strict=True):
        x = row
        if inner:
            x = [
                max(0.0, sum(a * b for a, b in zip(w, row, strict=True)) + c)
                for w, c in zip(inner[0].tolist(), inner[1].tolist(), strict=True)
            ]
        expected = sum(a * b for a, b in zip(probe.weight.tolist(), x, strict=True))
        assert found == pytest.approx(expected + 0.25, abs=1e-5)


def test_other_files_are_refused_in_words(tmp_path):
    """Red if a broken file ends in a traceback, or a large one is read."""
    big, none = tmp_path / "big", tmp_path / "none"
    big.write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(ProbeError, match="expected at most"):
        load_probe(big)
    with pytest.raises(ProbeError, match="cannot be read"):
        load_probe(none)
    none.write_bytes(b"x" * 100)
    with pytest.raises(ProbeError, match="is no probe"):
        load_probe(none)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, none, metadata={"probe": '{"format": 3}'})
    with pytest.raises(ProbeError, match="has the format 3"):
        load_probe(none)
    with pytest.raises(ProbeError, match="would have"):
        save_probe(make(size=1 << 18, layers=()), none)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"target": Target("c", "x")}, "its weights has"),
        ({"target": Target("x", "w")}, "its configuration has"),
        ({"question": "Why?"}, "the question 'Right?'"),
        ({"threshold": 0.7}, "the threshold 0.5"),
        ({"segmenter": "line"}, "the segmenter 'step'"),
        ({"target": LEARNT.target, "segmenter": "step", "threshold": 0.5}, ""),
    ],
)
def test_a_probe_is_for_what_it_was_learnt_for(given, told):
    """Red if a probe judges what it was not learnt for."""
    found = misfit(make(), **given)
    assert told in found and bool(told) == bool(found)


def test_usual_layers_lie_inside():
    """Red if a small target is asked for a layer that it has not."""
    assert usual_layers(24) == (6, 12, 18)
    for num in range(2, 40):
        layers = usual_layers(num)
        assert layers == tuple(sorted(layers)) and 1 <= layers[0] <= layers[-1] < num


@pytest.mark.parametrize("cutoff", [None, 0.0, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("band", [None, 0.0, 0.5, 1.0])
def test_a_band_lies_around_its_cutoff(cutoff, band):
    """Red if a band leaves its cutoff out, or 0 or 1 is not none or all of it."""
    point = Point(0.5, 0.3, 0.8).adjusted(cutoff, band)
    assert 0 <= point.low <= point.cutoff <= point.high <= 1
    assert point.cutoff == (0.5 if cutoff is None else cutoff)
    if cutoff is None and band is None:
        assert point == Point(0.5, 0.3, 0.8)
    if band == 0:
        assert all(point.is_sure(k / 100) for k in range(101))
    if band == 1:
        assert not any(point.is_sure(k / 100) for k in range(1, 100))
