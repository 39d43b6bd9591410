"""A whole server over captured graphs, and an error in each of its fast paths."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from sglang_parse.cli import doctor
from sglang_parse.demo import servers
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from tests.integration.conftest import COMMON, EAGLE, PARSE
from tests.support.client import Server
from tests.support.made_plugin import write_plugin
from tests.support.warm_servers import WarmServer

pytestmark = pytest.mark.own_server
ROOT = Path(__file__).parents[2]
# What breaks, in turns: a path is broken before those that need it.
BROKEN = (
    ("short_passes",),
    ("target_steps", "draft_steps", "head_steps"),
    ("pass_graphs",),
    ("sampled_rows",),
    ("route_mask",),
    ("route_virtual",),
)
# BROKEN_FILE names the paths that raise from now on.
PLUGIN = """
    import sys
    from pathlib import Path

    sys.path.append({root!r})
    FILE = Path({file!r})


    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        hooks = (
            ("plugin.worker.ParseWorker.init_attention_backends", install, "BEFORE"),
            ("verify.short_passes.ShortPasses.run", short_pass, "BEFORE"),
            ("verify.passes.TargetVerifier.verify_by", route, "BEFORE"),
            ("verify.model.TargetModel._sample", sampled, "BEFORE"),
        )
        for name, function, kind in hooks:
            HookRegistry.register(f"sglang_parse.{{name}}", function, HookType[kind])


    def install(worker):
        from tests.support import cpu_graphs

        cpu_graphs.install(prefills=True)
        replay = cpu_graphs.ReplayBackend.replay

        def broken(self, *args, **kwargs):
            runner = self.runner.model_runner
            is_head = "eagle" in type(runner.model).__name__.lower()
            role = "draft" if runner.is_draft_worker else "target"
            if "Prefill" not in type(self.runner).__name__:
                fail(f"{{'head' if is_head else role}}_steps")
            elif runner.prefill_cuda_graph_runner.__dict__.get("can_run_graph"):
                fail("pass_graphs")
            return replay(self, *args, **kwargs)

        cpu_graphs.ReplayBackend.replay = broken


    def short_pass(*args):
        fail("short_passes")


    def route(verifier, route, plan, **more):
        fail(f"route_{{route}}")


    def sampled(target, round, owner, offset):
        if len(owner) > 1:
            fail("sampled_rows")


    def fail(name):
        if FILE.exists() and name in FILE.read_text().split():
            raise RuntimeError(f"the test breaks {{name}}")
"""


@pytest.fixture(scope="module")
def expected(pool, prompts):
    """The target's own answers."""
    return [r["output_ids"] for r in pool.get("target").generate_all(prompts, 4)]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory, expected):
    """(server, its log, the file that breaks paths)."""
    folder = tmp_path_factory.mktemp("graphs")
    broken, log = folder / "broken", folder / "server.log"
    source = PLUGIN.format(root=str(ROOT), file=str(broken))
    plugin = write_plugin(folder / "plugin", "parse_graphs", source)
    flags = (*COMMON, *PARSE, *EAGLE, "--enable-metrics", "--max-running-requests")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(plugin), prepend=":")
        environment.setenv("XDG_CACHE_HOME", str(folder))
        process = WarmServer((*flags, "16"), "graphs", log)
    with process:
        yield Server(process.url), log, broken


# Faults of tests/support/proof_child.py that a server is started with, and what is off.
FAULTS = {
    "drafts": (
        ("draft_steps: stale_tokens", "short_passes: wrong place"),
        {"draft_steps", "short_passes", "head_steps"},
    ),
    "passes": (("route_mask: slot freed early",), {"route_mask", "route_virtual"}),
}
FAULTY = """
    import sys

    sys.path.append({root!r})


    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        name = "sglang_parse.plugin.worker.ParseWorker.init_attention_backends"
        HookRegistry.register(name, install, HookType.BEFORE)


    def install(worker):
        from tests.support import cpu_graphs, proof_child

        cpu_graphs.install(prefills=True)
        known = proof_child.faults()
        for name in {names!r}:
            for owner, attribute, broken in known[name][1]:
                setattr(owner, attribute, broken)
"""


@pytest.mark.parametrize("names", FAULTS.values(), ids=FAULTS)
def test_a_server_finds_its_faults_and_serves(tmp_path, prompts, expected, names):
    """Red if a server with faults starts by the paths that they are in, or does not
    serve the target's answers by the others."""
    faults, off = names
    source = FAULTY.format(root=str(ROOT), names=faults)
    plugin = write_plugin(tmp_path / "plugin", "parse_faults", source)
    log, flags = tmp_path / "server.log", (*COMMON, *PARSE, *EAGLE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(plugin), prepend=":")
        environment.setenv("XDG_CACHE_HOME", str(tmp_path))
        process = WarmServer((*flags, "--max-running-requests", "16"), "faulty", log)
    with process:
        server = Server(process.url)
        states = {name: one["state"] for name, one in paths_of(server).items()}
        assert {name for name, state in states.items() if state == "off"} == off
        for mode in ("exact", "off"):
            custom = {"parse_mode": mode}
            found = server.generate_all(prompts[:5], 5, custom=custom)
            assert [r["output_ids"] for r in found] == expected[:5]
    text = log.read_text()
    assert all(f"PARSE: {name} is off: " in text for name in off)


def paths_of(server):
    info = requests.get(server.url + "/server_info", timeout=60).json()
    return info["internal_states"][0]["parse"]["paths"]


@pytest.mark.parametrize(("num", "concurrency"), [(3, 1), (5, 5), (16, 16)])
def test_captured_steps_answer_like_the_target(
    graphs, prompts, expected, num, concurrency
):
    """Red if a captured step, a short pass or a head's step gives another token."""
    server, log, _ = graphs
    for mode in ("exact", "off"):
        custom = {"parse_mode": mode}
        found = server.generate_all(prompts[:num], concurrency, custom=custom)
        assert [r["output_ids"] for r in found] == expected[:num]
    states = {name: one["state"] for name, one in paths_of(server).items()}
    assert set(states.values()) == {"proven"} and len(states) == 10
    assert "PARSE: fast paths after" in log.read_text()


def test_an_error_in_any_path_costs_no_request_a_token(graphs, prompts, expected):
    """Red if a server ends, or a request is lost or answered otherwise, where a fast
    path raises; or if it is not shown."""
    server, log, broken = graphs
    for i in range(len(BROKEN)):
        names = [name for names in BROKEN[: i + 1] for name in names]
        broken.write_text(" ".join(names))
        for mode in ("off", "exact", "semantic"):
            found = server.generate_all(prompts[:5], 5, custom={"parse_mode": mode})
            if mode != "semantic":
                assert [r["output_ids"] for r in found] == expected[:5]
            assert all(r["output_ids"] for r in found)
        states = paths_of(server)
        assert {n for n, one in states.items() if one["state"] == "off"} == {*names}
    assert "RuntimeError: the test breaks" in states["route_mask"]["why"]
    text = log.read_text()
    for name in states:
        told = text.count(f"PARSE: {name} is off until the server restarts")
        assert told == (states[name]["state"] == "off")
    # Nothing can be verified any more, and whoever asks for it is told.
    lines = requests.get(server.url + "/metrics", timeout=60).text.splitlines()
    shown = [one for one in lines if one.startswith("sglang:parse_path_on{")]
    assert {one[-3:] for one in shown if 'path="route_mask"' in one} == {"0.0"}
    asked = server.post(
        "/generate",
        server.body(
            prompts[0], custom={"parse_verify": "5 plus 3 is 8."}, max_new_tokens=1
        ),
    )
    assert asked.status_code == 500 and "parse_verify cannot be judged" in asked.text
    assert server.is_alive()


def test_doctor_proves_the_embedded_pair(monkeypatch):
    """Red if `doctor --prove` leaves out a path, or calls an absent one a fault."""
    monkeypatch.setattr(servers, "ServerProcess", WarmServer)
    found = list(doctor.prove_paths(str(TARGET_PATH), str(DRAFT_PATH)))
    assert all(one.ok for one in found), found
    lines = [one.text for one in found]
    proven = ("route_mask", "route_virtual", "sampled_rows")
    assert {f"{name} is proven" for name in proven} <= {*lines}
    assert "target_steps is absent, decode steps are not captured" in lines
