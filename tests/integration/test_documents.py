"""Commands of the documents, executed with the embedded pair. Answers are cut short."""

import json
import re
import subprocess
from types import SimpleNamespace

import pytest

from sglang_parse.cli import demo_run
from sglang_parse.cli import main as cli
from tests.support.documents import ROOT, commands

CURLS = [(page.name, words) for page, words in commands() if words[0] == "curl"]
PLACE = "localhost:30000"
# The pair answers questions of its own task alone, and other answers do not end.
MOST = 16


@pytest.mark.parametrize(("page", "words"), CURLS, ids=[page for page, _ in CURLS])
def test_a_request_is_answered_with_a_report(parse, page, words):
    """Red if a body that a page shows is refused, or brings no report back."""
    *words, body = (w.replace(PLACE, parse.url.partition("//")[2]) for w in words)
    body = json.dumps(json.loads(body) | {"max_tokens": MOST})
    command = [*words, body, "-sS"]
    reply = subprocess.run(command, capture_output=True, text=True, check=True)
    (choice,) = json.loads(reply.stdout)["choices"]
    (report,) = choice["meta_info"]["parse"]
    assert report["mode"] == "semantic"


def test_the_clients_example_is_answered(parse):
    """Red if the code of the page on clients fails, or brings no report back."""
    page = (ROOT / "docs" / "guide" / "clients.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("http://127.0.0.1:30000", parse.url)
    names: dict = {}
    exec(code.replace('model="default"', f'model="default", max_tokens={MOST}'), names)
    (report,) = names["answer"].choices[0].meta_info["parse"]
    assert report["mode"] == "semantic"


def test_trace_shows_an_answer(parse, capsys):
    """Red if `trace` ends without the counts of an answer."""
    assert cli.main(["trace", "--url", parse.url]) == 0
    assert "target passes" in capsys.readouterr().out


def test_calibrate_writes_a_setting(parse, tmp_path):
    """Red if `calibrate` writes what a server does not read."""
    out = tmp_path / "parse.json"
    sizes = "--problems 6 --screen 2 --budget 40 --thresholds 0.5 --segmenters step"
    argv = ["calibrate", "--url", parse.url, "--out", str(out), *sizes.split()]
    assert cli.main(argv) == 0
    assert json.loads(out.read_text())["mode"] in ("semantic", "exact", "off")


def test_demo_measures_both_servers(target, parse, tmp_path, monkeypatch, capsys):
    """Red if the demo ends early, or answers wrong. Its servers are those here."""

    def server(args, name, log_path):
        url = (parse if "PARSE" in args else target).url
        calls = dict.fromkeys(("start", "wait_ready", "stop"), lambda: None)
        return SimpleNamespace(name=name, url=url, ready_s=0.0, **calls)

    monkeypatch.setattr(demo_run, "ServerProcess", server)
    out = tmp_path / "demo.json"
    argv = ["demo", "--problems", "2", "--concurrency", "2", "--json", str(out)]
    assert cli.main(argv) == 0
    arms = {arm["arm"]: arm for arm in json.loads(out.read_text())["arms"]}
    assert [arms[name]["accuracy"] for name in ("target", "parse")] == [1, 1]
    assert "Start the server by hand" in capsys.readouterr().out
