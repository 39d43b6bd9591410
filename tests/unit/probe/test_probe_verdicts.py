"""Verdicts without rows: who judges each boundary, and what is kept because of it."""

import base64
import itertools
import json
import random

import numpy as np
import pytest
import torch

from sglang_parse.probe.linear_probe import Learnt, Probe, TargetHashes
from sglang_parse.probe.pair_file import PairFile
from sglang_parse.probe.probe_guard import ProbeGuard
from tests.support.fake_engine import (
    LINE,
    STOP,
    SUFFIX,
    FakeDrafter,
    FakeServer,
    FakeTarget,
    make_request,
)

BAD = 20  # a token that makes all prefixes behind it invalid


def make_probe():
    return Probe(
        Learnt(TargetHashes("c", "w"), "q", SUFFIX, 0.5), (), 1, {"line": 0.5},
        weight=torch.ones(1), bias=torch.tensor(0.0),
    )  # fmt: skip


def judge(tokens):
    return 0.05 if BAD in tokens else 0.95


def state(tokens):
    """Of the judge's opinion."""
    return [-4.0 if BAD in tokens else 4.0]


def own(tokens):
    return 30


def drafts(*lines):
    """A drafter that writes these lines in turn, and then ends."""
    parts = [(*line, LINE) for line in lines]

    def write(tokens):
        return (*itertools.chain(*parts), STOP)

    return FakeDrafter(write)


def serve(lines, *, kind, guard=None):
    target = FakeTarget(own, judge, state)
    server = FakeServer(target, [drafts(*lines)], probe=make_probe(), guard=guard)
    req = make_request(judge_kind=kind)
    return server, target, req


def rows(target):
    return [plan.num_verify_tokens for plan in target.plans]


LINES = [(10, 11), (12,), (BAD, 13), (14,)]


def test_a_probe_keeps_what_the_suffix_keeps_and_takes_no_rows():
    """Red if verdicts are read at other rows than the boundaries', or rows remain."""
    kept = {}
    for kind in ("suffix", "probe"):
        server, target, req = serve(LINES, kind=kind)
        (r,) = server.round(req).requests
        kept[kind] = (r.decision, r.kept.cut, target.num_passes)
        suffixes = len(r.boundaries) * len(SUFFIX) if kind == "suffix" else 0
        assert rows(target) == [1 + len(r.shown) + suffixes]
        assert set(r.verdict.judged_by) == (set() if kind == "suffix" else {"probe"})
    assert kept["probe"] == kept["suffix"]


def test_the_guards_share_is_asked_in_the_same_pass():
    """Red if the guard sees other boundaries than it drew, or the probe's verdict
    stands where the suffix was asked."""
    guard = ProbeGuard(share=1.0, least=0.5)
    server, target, req = serve(LINES, kind="probe", guard=guard)
    (r,) = server.round(req).requests
    assert target.num_passes == 1
    assert set(r.verdict.judged_by) == {"suffix"}
    assert guard.num_compared == len(r.boundaries) and guard.agreement == 1.0
    assert r.verdict.scores == pytest.approx([0.95, 0.95, 0.05, 0.05])


def test_a_probe_that_is_wrong_is_found_out_and_the_suffix_judges():
    """Red if a probe of another task goes on to judge: it accepts everything here."""
    guard = ProbeGuard(share=0.02, least=0.95)
    target = FakeTarget(own, judge, lambda tokens: [4.0])
    server = FakeServer(
        target, [drafts((10,), (BAD,), (11,))], probe=make_probe(), guard=guard
    )
    judged = 0
    while guard.holds:
        req = make_request(judge_kind="probe")
        judged += len(server.round(req).requests[0].boundaries)
        assert judged <= 500
    (r,) = server.round(make_request(judge_kind="probe")).requests
    assert not r.verdict.judged_by and rows(target)[-1] > 1 + len(r.shown)
    assert r.decision.num_judged == r.boundaries[0]
    assert guard.num_compared > 0  # and the probe is compared on


def test_kinds_of_judges_stand_side_by_side_in_a_batch():
    """Red if scores of one request land on another's boundaries."""
    rng = random.Random(3)
    for _ in range(50):
        num, by_prompt = rng.randint(1, 5), {}
        target = FakeTarget(own, judge, state)
        drafter = FakeDrafter(lambda tokens, of=by_prompt: of[tokens[0]])
        server = FakeServer(target, [drafter], probe=make_probe())
        reqs = []
        for k in range(num):
            tokens = [rng.choice([10, 11, LINE, LINE, BAD]) for _ in range(12)]
            by_prompt[100 + k] = (*tokens, STOP)
            kind = rng.choice(["suffix", "probe"])
            reqs.append(make_request(prompt=(100 + k,), judge_kind=kind))
        before = [(*r.origin_input_ids, *r.output_ids) for r in reqs]
        found = server.round(*reqs)
        for prompt, r in zip(before, found, strict=True):
            kinds = r.verdict.judged_by or ["suffix"] * len(r.boundaries)
            for b, value, by in zip(r.boundaries, r.verdict.scores, kinds, strict=True):
                prefix = prompt + r.draft.tokens[:b]
                (logit,) = state(prefix)
                expected = judge(prefix)
                if by == "probe":
                    expected = float(torch.sigmoid(torch.tensor(logit)))
                assert value == pytest.approx(expected)
            assert bool(r.verdict.judged_by) == (r.state.judge_kind != "suffix")


def test_pairs_are_the_states_and_scores_of_the_boundaries(tmp_path):
    """Red if a pair joins the state of one prefix with the verdict of another."""
    target = FakeTarget(own, judge, lambda tokens: [float(len(tokens))])
    pairs = PairFile(str(tmp_path / "pairs"), {})
    server = FakeServer(target, [drafts(*LINES)], pairs=pairs)
    req = make_request(prompt=(10, 11), output=(12,))
    (r,) = server.round(req).requests
    _, *found = map(json.loads, (tmp_path / "pairs").read_text().splitlines())
    states = [np.frombuffer(base64.b64decode(p["state"]), np.float16) for p in found]
    assert [state.tolist() for state in states] == [[3 + b] for b in r.boundaries]
    scores = [one["score"] for one in found]
    assert scores == pytest.approx([0.95, 0.95, 0.05, 0.05])
    told = [(one["request"], one["index"], one["segmenter"]) for one in found]
    assert told == [("r", k, "line") for k in range(4)]


def test_the_planner_knows_that_a_probes_boundary_costs_no_rows():
    """Red if windows of probe-judged requests are planned as if suffixes were asked."""
    seen = {}
    for kind in ("suffix", "probe"):
        server, _, req = serve(LINES, kind=kind)
        server.engine.planner.adaptive = True
        server.engine.planner.gate.choose = _noting(
            server.engine.planner.gate.choose, seen, kind
        )
        server.round(req)
    assert seen == {"suffix": len(SUFFIX), "probe": 0}


def _noting(choose, seen, kind):
    def noted(asked):
        seen[kind] = asked.suffix_len
        return choose(asked)

    return noted
