"""Pairs that a server writes: bounded, and numbered by request."""

import json

import torch

from sglang_parse.probe.pair_file import PairFile


class Owner:
    pass


def rows_of(path):
    about, *rows = map(json.loads, path.read_text().splitlines())
    assert about == {"of": "these"}
    return [(one["request"], one["index"]) for one in rows]


def test_verdicts_are_numbered_by_request(tmp_path):
    """Red if two requests share a count of verdicts, or too much is written."""
    pairs = PairFile(str(tmp_path / "p"), {"of": "these"}, most=7)
    a, b = Owner(), Owner()
    for owner, rid in ((a, "a"), (b, "b"), (a, "a"), (b, "b")):
        states = torch.full((3, 2), 1e9, dtype=torch.bfloat16)
        pairs.add(owner, states, [0.1] * 3, segmenter="step", rid=rid)
    assert rows_of(tmp_path / "p") == [
        *(("a", k) for k in range(3)), *(("b", k) for k in range(3)),
        *(("a", k) for k in range(3, 6)),
    ]  # fmt: skip


def test_a_full_disk_ends_the_file_and_not_the_server(tmp_path, monkeypatch, caplog):
    """Red if what cannot be written stops the scheduler, or is tried again."""
    pairs = PairFile(str(tmp_path / "p"), {"of": "these"})

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pairs, "_file", type("Full", (), {"write": full})())
    for _ in range(2):
        pairs.add(Owner(), torch.ones(1, 2), [0.1], segmenter="step", rid="a")
    assert caplog.text.count("No space left") == 1
