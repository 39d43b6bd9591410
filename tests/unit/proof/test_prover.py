"""What the proof at start makes of each path, and what its record makes of a crash."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.proof import prover
from sglang_parse.proof.path_checks import NotTaken, PathCheck
from sglang_parse.proof.plain_path import LEAST_ALLOWED, ReferenceFailed, difference
from sglang_parse.proof.proof_record import ProofRecord, fingerprint
from sglang_parse.proof.prover import Prover, summary
from sglang_parse.sgl.fast_paths import PATHS, TARGET_STEPS, FastPaths
from sglang_parse.sgl.ranks import Ranks

NAME = TARGET_STEPS
#: No process has it: Linux gives ids up to 2 ** 22.
DEAD = str(1 << 23)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def raising(error):
    def measure():
        raise error

    return measure


def settle(measure, *, absent="", level="fast", record=None, least=None, must=False):
    """least: of what the other ranks found."""
    paths, ranks = FastPaths(), Ranks(SimpleNamespace(world_size=1))
    if least is not None:
        ranks.agree_on_least = lambda values: [min(v, least) for v in values]
    prover = Prover(paths, ranks, record or ProofRecord("one"), level)
    prover.settle(PathCheck(NAME, lambda: absent, measure, must))
    return paths, paths.states[NAME]


@pytest.mark.parametrize(
    ("measure", "state", "why"),
    [
        (lambda: (0.01, 0.02), "proven", ""),
        (lambda: (0.31, 0.02), "off", "differ from the plain path's by 0.31"),
        (lambda: (float("inf"), 0.02), "off", "by inf"),
        (raising(RuntimeError("no kernel")), "off", "raised RuntimeError: no kernel"),
        (raising(ReferenceFailed("too noisy")), "unproven", "too noisy"),
        (raising(NotTaken("no size")), "unproven", "no size"),
    ],
)
def test_a_path_that_raises_or_differs_is_off(measure, state, why, caplog):
    """Red if a wrong path serves, a right one does not, or the log does not say by how
    much in one line."""
    with caplog.at_level(logging.INFO):
        paths, found = settle(measure)
    assert found.state == state and why in found.why
    assert paths.is_on(NAME) == (state != "off") and not paths.is_proving
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == (state == "off") and all(NAME in one for one in lines)
    assert f"{state} {NAME}" in summary(paths)


def test_the_only_way_of_a_pass_is_off_unless_it_was_measured():
    """Red if a server drafts by what was never seen on its device."""
    for why in (ReferenceFailed("too noisy"), NotTaken("no size")):
        assert settle(raising(why), must=True)[1].state == "off"
    assert settle(lambda: (0.01, 0.02), must=True)[1].state == "proven"


@pytest.mark.parametrize(("most_rows", "longest"), [(48, 48), (0, 2048), (4096, 2048)])
@pytest.mark.parametrize("can_pass", [True, False])
def test_passes_that_are_steps_alone_fit_a_captured_step(
    monkeypatch, most_rows, longest, can_pass
):
    """Red if drafts are longer than what is captured, or go on without any way for a
    pass."""
    monkeypatch.setattr(prover, "open_checks", lambda *_, is_full: [])
    monkeypatch.setattr(prover, "fingerprint", lambda *_: "one")
    verifier = SimpleNamespace(
        runner=SimpleNamespace(device="cpu"),
        paths=FastPaths(),
        steps_alone=True,
        can_pass=can_pass,
    )
    parts = SimpleNamespace(
        verifier=verifier,
        draft_runners=[],
        server_args=None,
        config=SimpleNamespace(prove="fast"),
        ranks=Ranks(SimpleNamespace(world_size=1, is_first_rank=True)),
    )
    stopped: list[bool] = []
    short_passes = SimpleNamespace(most_rows=most_rows)
    engine = SimpleNamespace(
        stop_drafting=lambda: stopped.append(True),
        slots=SimpleNamespace(max_rows=2048),
        target=SimpleNamespace(short_passes=short_passes),
    )
    prover.prove(parts, engine)
    assert engine.slots.max_rows == longest
    assert bool(stopped) != can_pass


def test_a_path_is_on_only_where_all_ranks_have_proven_it():
    """Red if ranks serve by different paths."""
    _, found = settle(lambda: (0.0, 1.0), least=0)
    assert found.state == "off" and "another rank" in found.why
    _, found = settle(lambda: (0.0, 1.0), least=1)
    assert found.state == "unproven"


def test_a_proven_path_is_not_tried_again_unless_the_proof_is_full():
    """Red if each start pays for the proof, or `full` believes an old one."""
    settle(lambda: (0.0, 1.0))
    wrong = raising(AssertionError("tried"))
    _, found = settle(wrong)
    assert (found.state, found.why) == ("proven", "at an earlier start")
    assert settle(wrong, level="full")[1].state == "off"
    # What differed once is tried again.
    assert settle(lambda: (0.0, 1.0))[1].state == "proven"


def test_off_and_absent_are_not_tried():
    """Red if `off` runs anything, or a path that the server lacks is called proven."""
    wrong = raising(AssertionError("tried"))
    assert settle(wrong, level="off")[1].state == "unproven"
    _, found = settle(wrong, absent="no graphs")
    assert (found.state, found.why) == ("absent", "no graphs")


def test_a_path_under_which_the_process_died_is_off_at_the_next_start():
    """Red if a server crashes at every start, or takes another server that is trying a
    path right now for a dead one."""
    wrong = raising(AssertionError("tried"))
    ProofRecord("one").set(NAME, DEAD)
    paths, found = settle(wrong, level="full")
    assert found.state == "off" and "ended while it tried" in found.why
    assert not paths.is_on(NAME)
    ProofRecord("one").set(NAME, str(os.getpid()))
    assert settle(lambda: (0.0, 1.0))[1].state == "proven"


def test_the_record_names_the_path_while_it_is_tried_and_only_then():
    """Red if a crash leaves no mark, or an ordinary error leaves one."""
    seen = []

    def measure():
        seen.append(ProofRecord("one").path.read_text())
        raise RuntimeError

    settle(measure)
    assert f'"{NAME}": "{os.getpid()}"' in seen[0]
    assert NAME not in ProofRecord("one").path.read_text()


def test_a_server_that_is_stopped_on_a_cpu_proves_again():
    """Red if whoever stops a server on a CPU while it starts switches a path off for
    good: no path can end the process there. What is proven is kept."""
    seen = []

    def measure():
        seen.append(ProofRecord("one").has_died(NAME))
        seen.append(ProofRecord("one").path.exists())
        return 0.0, 1.0

    record = ProofRecord("one", marks=False)
    assert settle(measure, record=record)[1].state == "proven"
    assert seen == [False, False] and ProofRecord("one").is_proven(NAME)


def test_a_folder_that_cannot_be_written_costs_the_record_alone(monkeypatch):
    """Red if a server with a read-only home does not start."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert settle(lambda: (0.0, 1.0))[1].state == "proven"


def test_a_fingerprint_changes_with_what_may_change_results_alone():
    """Red if another model or flag finds this one's proof, or another port does not."""
    config = SimpleNamespace(prove="fast", window=8)
    model = SimpleNamespace(to_json_string=lambda: "{}")
    runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=model))

    def of(*, prove="fast", **flags):
        config.prove = prove
        return fingerprint(SimpleNamespace(**flags), config, [runner])

    one = of(dtype="auto", port=1, api_key="a", _launch_command="--port 1")
    other = {"port": 2, "api_key": "b", "_launch_command": "--port 2"}
    assert one == of(dtype="auto", **other, prove="full")
    assert one != of(dtype="half", port=1, api_key="a")
    model.to_json_string = lambda: '{"layers": 2}'
    assert one != of(dtype="auto", port=1, api_key="a")


def test_a_difference_is_a_share_of_the_spread():
    """Red if large logits look wrong, a wrong row hides among right ones, or NaN is
    within the noise."""
    plain = 100 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    assert difference(plain.clone(), plain) == 0.0
    assert difference(plain + 1e-3, plain) < LEAST_ALLOWED
    wrong = plain.clone()
    wrong[2] = wrong[2].flip(0)
    assert difference(wrong, plain) > 1
    wrong[2, 7] = float("nan")
    assert difference(wrong, plain) == float("inf")
    # A target may have padded its vocabulary, or forbid tokens.
    wide = torch.cat([plain, torch.zeros(3, 4)], dim=1)
    assert difference(wide, plain) == 0.0
    plain[:, 3] = -float("inf")
    assert difference(plain.clone(), plain) == 0.0


def test_every_path_has_a_place():
    """Red if a route of some backend has no name among PATHS."""
    from sglang_parse.sgl.fast_paths import route_path
    from sglang_parse.verify.backends.routes import BACKENDS

    routes = {route for backend in BACKENDS.values() for route in backend.inputs}
    assert {route_path(route) for route in routes} <= set(PATHS)


def test_each_path_is_in_the_documents_with_a_test_that_exists():
    """Red if the table of what has run where lacks a path, or names a test that is
    gone."""
    root = Path(__file__).parents[3]
    text = (root / "docs" / "guide" / "fast-paths.md").read_text(encoding="utf-8")
    table = text.partition("## What has run where")[2]
    assert [name for name in PATHS if f"`{name}`" not in table] == []
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", table)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (root / "tests" / file).read_text(), test
