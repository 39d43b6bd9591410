"""A fault that nobody survives ends the server at once, and says whose request it was.

The fault comes from a plugin of this test, which SGLang finds on PYTHONPATH.
"""

import textwrap
import time

import psutil
import pytest
import requests

from sglang_parse.bench.servers import ServerError, ServerProcess
from tests.integration.conftest import COMMON, PARSE
from tests.support.client import Server

PLUGIN = """
    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(
            "sglang_parse.engine.round.RoundEngine.verify", fail, HookType.BEFORE
        )


    def fail(engine, round, plan):
        if any(r.req.rid == "victim" for r in round):
            raise RuntimeError("a fault of the test")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A package with an entry point, as pip would install it."""
    (tmp_path / "parse_fault.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "parse_fault-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: parse-fault\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nparse_fault = parse_fault:register\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_the_server_ends_and_names_the_request(plugin, tmp_path):
    """Red if the process stays, ends with 0, leaves children, or says not which."""
    process = ServerProcess((*COMMON, *PARSE), "faulty", tmp_path / "log")
    with process:
        family = process.processes()
        server = Server(process.url)
        body = server.body("Tom has 3 apples.", custom={"parse_threshold": 0.0})
        with pytest.raises(requests.RequestException):
            server.post("/generate", body | {"rid": "victim"})
        deadline = time.monotonic() + 30
        with pytest.raises(ServerError, match="ended after"):
            while time.monotonic() < deadline:
                process.check_alive()
                time.sleep(0.2)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
    log = (tmp_path / "log").read_text()
    (line,) = [s for s in log.splitlines() if "PARSE cannot go on" in s]
    assert line.endswith("a round of 1 request(s) raised RuntimeError; ids 'victim'")
    assert "apples" not in line
