"""A server's probe is opened only where it fits, and told in one sentence elsewhere."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.train_probe.save import save_probe
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.probe.linear_probe import Learnt, Probe
from sglang_parse.probe.open_probe import OpenedProbe, check_probe_flags, open_probe
from sglang_parse.probe.target_fingerprint import fingerprint
from tests.support.fake_engine import make_request

CONFIG = ParseConfig(segmenter="step", threshold=0.5)
SUFFIX = (5, 6)
SERVER = SimpleNamespace(model_path=str(TARGET_PATH))


def make(layers=(1, 2), size=4, suffix=SUFFIX):
    target = fingerprint(str(TARGET_PATH))
    learnt = Learnt(target, CONFIG.judge_suffix, suffix, 0.5)
    weight = torch.ones((len(layers) + 1) * size)
    return Probe(learnt, layers, size, {"step": 0.5}, weight, torch.tensor(0.0))


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a probe on a target of 4 layers and width 4; the flags may differ."""
    model = SimpleNamespace(num_hidden_layers=4, hidden_size=4)
    shown = []
    verifier = SimpleNamespace(
        runner=SimpleNamespace(model_config=model),
        show_layers=lambda *args: shown.append(args),
    )
    judge = SimpleNamespace(ask=lambda question: SimpleNamespace(suffix=SUFFIX))

    def open_it(probe, **flags):
        save_probe(probe, tmp_path / "probe")
        config = replace(CONFIG, probe=str(tmp_path / "probe"), **flags)
        found = open_probe(SERVER, config, judge, verifier)
        return found, shown[-1]

    return open_it


def test_layers_of_the_probe_are_shown_and_the_guard_is_optional(opened):
    """Red if other layers are shown, or a guard runs that is switched off."""
    found, shown = opened(make())
    assert shown == ((1, 2), "--speculative-parse-probe")
    assert found.guard is not None and found.pairs is None
    assert opened(make(), probe_check=0.0)[0].guard is None


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        ({"layers": (1, 10**9)}, "has the layers 1000000000; this target has"),
        ({"layers": (4,)}, r"has the layers 4; this target has range\(1, 4\)"),
        ({"size": 5}, r"has the hidden_size 5; this target has \(4,\)"),
        ({"suffix": (5, 7)}, r"has the suffix \(5, 7\); this target has"),
    ],
)
def test_a_probe_that_the_target_cannot_feed_is_refused(opened, probe, told):
    """Red if such a probe is served."""
    with pytest.raises(ValueError, match=f"--speculative-parse-probe '.*' {told}"):
        opened(make(**probe))


def test_a_file_of_pairs_begins_with_what_they_are_bound_to(opened, tmp_path):
    """Red if a probe could be learnt for another question or target, or a server starts
    that can write nothing."""
    path = tmp_path / "pairs"
    found, _ = opened(make(), probe_collect=str(path))
    found.pairs.add(make(), torch.ones(1, 12), [0.5], segmenter="step", rid="r")
    about, pair = map(json.loads, path.read_text().splitlines())
    assert about["layers"] == [1, 2] and about["hidden_size"] == 4
    assert about["learnt"]["suffix"] == [5, 6]
    assert (pair["request"], pair["index"], pair["score"]) == ("r", 0, 0.5)
    with pytest.raises(ValueError, match="probe-collect '/no/x' cannot be written"):
        opened(make(), probe_collect="/no/x")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"probe": "/no/probe"},
            "--speculative-parse-probe '/no/probe' cannot be read",
        ),
        ({"threshold": 0.7}, "threshold 0.5, and --speculative-parse-threshold is 0.7"),
        ({"segmenter": "line"}, "and --speculative-parse-segmenter is 'line'"),
        ({"judge_suffix": "Why?"}, "and --speculative-parse-judge-suffix is 'Why\?'"),
    ],
)
def test_flags_that_do_not_go_with_a_probe_are_refused(tmp_path, flags, told):
    """Red if a probe judges what it was not learnt for, or states leave unasked."""
    save_probe(make(), tmp_path / "probe")
    config = replace(CONFIG, **{"probe": str(tmp_path / "probe"), **flags})
    with pytest.raises(ValueError, match=told):
        check_probe_flags(SERVER, config)
    check_probe_flags(SERVER, replace(CONFIG, probe=str(tmp_path / "probe")))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "probe"),
        ({"judge": "probe"}, "probe"),
        ({"judge": "suffix"}, "suffix"),
        ({"threshold": 0.7}, "suffix"),
        ({"segmenter": "line"}, "suffix"),
        ({"judge_suffix": "Why?"}, "suffix"),
        ({"threshold": 0.7, "judge": "probe"}, None),
    ],
)
def test_a_request_is_judged_by_what_it_fits(options, kind):
    """Red if a probe is read under settings that it was not learnt for."""
    request = make_request(config=CONFIG, **options)
    options = request.state.options
    if kind is None:
        with pytest.raises(ValueError, match="parse_judge is 'probe' and this"):
            OpenedProbe(CONFIG, make()).judge_kind(options)
        return
    assert OpenedProbe(CONFIG, make()).judge_kind(options) == kind
    if kind != "probe":
        assert OpenedProbe(CONFIG).judge_kind(options) == "suffix"
