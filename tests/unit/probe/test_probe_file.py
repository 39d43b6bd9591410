"""A probe and its file: what is written is read, and nothing else is."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.train_probe.save import save_probe
from sglang_parse.probe.linear_probe import (
    Learnt,
    Probe,
    ProbeError,
    TargetHashes,
    usual_layers,
)
from sglang_parse.probe.probe_file import MAX_BYTES, load_probe

TARGET = TargetHashes("c", "w")


def make(size=4, layers=(1, 2)):
    made = torch.Generator().manual_seed(1)
    return Probe(
        Learnt(TARGET, "Right?", (5, 6), 0.5), layers, size,
        {"step": 0.4},
        torch.randn((len(layers) + 1) * size, generator=made), torch.tensor(0.25),
        {"auc": 0.9},
    )  # fmt: skip


def test_a_file_holds_the_whole_probe(tmp_path):
    """Red if weights, points or bindings do not come back."""
    probe = make()
    save_probe(probe, tmp_path / "p")
    found = load_probe(tmp_path / "p")
    for name in ("learnt", "layers", "hidden_size", "cutoffs", "figures"):
        assert getattr(found, name) == getattr(probe, name)
    states = torch.randn(7, 12)
    torch.testing.assert_close(found.scores(states), probe.scores(states))


def test_scores_equal_nested_loops():
    """Red if a row or a column is taken for another."""
    probe, states = make(), torch.randn(5, 12)
    for row, found in zip(states.tolist(), probe.logits(states).tolist(), strict=True):
        expected = sum(a * b for a, b in zip(probe.weight.tolist(), row, strict=True))
        assert found == pytest.approx(expected + 0.25, abs=1e-5)


def test_what_is_no_file_of_ours_is_refused_in_words(tmp_path):
    """Red if such a file ends in a traceback, hangs, or is read though it is large."""
    big, none, pipe, other = (tmp_path / name for name in ("big", "no", "pipe", "x"))
    big.write_bytes(b"x" * (MAX_BYTES + 1))
    os.mkfifo(pipe)
    other.write_bytes(b"x" * 100)
    for path, told in (
        (big, "expected at most"),
        (none, "cannot be read"),
        (pipe, "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (other, "is no file of"),
    ):
        with pytest.raises(ProbeError, match=told):
            load_probe(path)
    with pytest.raises(ProbeError, match="would have"):
        save_probe(make(size=1 << 18, layers=()), other)


def about_of(path):
    """The metadata of a good file."""
    save_probe(make(), path)
    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    text = json.loads(header[8 : 8 + length])["__metadata__"]["probe"]
    return json.loads(text)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("format",), 3, r"Expected `str`, got `int` - at `\$.format`"),
        (("format",), "other", r"Invalid enum value 'other' - at `\$.format`"),
        (("layers",), [-1], r"Expected `int` >= 1 - at `\$.layers\[0\]`"),
        (("layers",), [2, 1], r"has the layers \(2, 1\); expected rising"),
        (("layers",), "abc", r"got `str` - at `\$.layers`"),
        (("layers",), [True, 2], r"got `bool` - at `\$.layers"),
        (("layers",), [1, 2, 3], r"shapes \(12,\) and \(\); expected \(16,\)"),
        (("hidden_size",), 0, r"Expected `int` >= 1 - at `\$.hidden_size`"),
        (("hidden_size",), float("nan"), "JSON is malformed"),
        (("learnt", "threshold"), "0.5", r"got `str` - at `\$.learnt.threshold`"),
        (("learnt", "threshold"), float("inf"), "JSON is malformed"),
        (("learnt", "suffix"), [5, -1], r">= 0 - at `\$.learnt.suffix"),
        (("learnt", "suffix"), [], r"length >= 1 - at `\$.learnt.suffix`"),
        (("learnt", "question"), 7, r"got `int` - at `\$.learnt.question`"),
        (("learnt", "target"), {"config": 1, "weights": "w"}, "target.config`"),
        (("points", "step", "cutoff"), 1.5, r"<= 1.0 - at `\$.points"),
        (("points", "step", "cutoff"), None, r"got `null` - at `\$.points"),
        (("points",), [], r"got `array` - at `\$.points`"),
        (("learnt",), None, r"got `null` - at `\$.learnt`"),
    ],
)
def test_each_wrong_value_is_told_with_what_was_expected(tmp_path, path, value, told):
    """Red if a file with such a value is served, or ends in a traceback."""
    file = tmp_path / "p"
    about = inner = about_of(file)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    weights = {"weight": torch.ones(12), "bias": torch.tensor(0.0)}
    save_file(weights, file, metadata={"probe": json.dumps(about)})
    with pytest.raises(ProbeError, match=told):
        load_probe(file)


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"weight": torch.full((12,), float("nan"))}, "12 values that are not finite"),
        ({"weight": torch.ones(12, dtype=torch.int32)}, "a weight of torch.int32"),
        ({"bias": torch.tensor(float("inf"))}, "a bias of .* 1 values"),
        ({"bias": torch.zeros(1)}, r"shapes \(12,\) and \(1,\)"),
        ({"weight": torch.ones(3)}, r"shapes \(3,\) and \(\); expected \(12,\)"),
        ({"weight": None}, "is no file of"),
    ],
)
def test_wrong_weights_are_refused(tmp_path, weights, told):
    """Red if scores come from such weights."""
    file = tmp_path / "p"
    about = json.dumps(about_of(file))
    tensors = {"weight": torch.ones(12), "bias": torch.tensor(0.0)} | weights
    tensors = {name: t for name, t in tensors.items() if t is not None}
    save_file(tensors, file, metadata={"probe": about})
    with pytest.raises(ProbeError, match=told):
        load_probe(file)


@pytest.mark.parametrize("text", ["[" * 200_000 + "]" * 200_000, "{", "null", "3"])
def test_metadata_that_is_no_object_is_refused(tmp_path, text):
    """Red if deeply nested metadata ends in a RecursionError."""
    save_file({"weight": torch.ones(12)}, tmp_path / "p", metadata={"probe": text})
    with pytest.raises(ProbeError, match="is no file of"):
        load_probe(tmp_path / "p")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"target": TargetHashes("c", "x")}, "its weights has"),
        ({"target": TargetHashes("x", "w")}, "its configuration has"),
        ({"question": "Why?"}, "the question 'Right?'"),
        ({"threshold": 0.7}, "the threshold 0.5"),
        ({"segmenter": "line"}, "the segmenter 'step'"),
        ({"target": TARGET, "segmenter": "step", "threshold": 0.5}, ""),
    ],
)
def test_a_probe_is_for_what_it_was_learnt_for(given, told):
    """Red if a probe judges what it was not learnt for."""
    found = make().misfit(**given)
    assert told in found and bool(told) == bool(found)


def test_usual_layers_lie_inside():
    """Red if a small target is asked for a layer that it has not."""
    assert usual_layers(24) == (6, 12, 18)
    for num in range(2, 40):
        layers = usual_layers(num)
        assert layers == tuple(sorted(layers)) and 1 <= layers[0] <= layers[-1] < num
