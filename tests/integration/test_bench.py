"""The benchmark harness on the running servers: arms, cells, report."""

import asyncio
import json
import re

from benchmarks.harness import arm_servers, plan, run
from benchmarks.harness.cells import CellStore
from benchmarks.harness.config import read_config
from benchmarks.harness.procedures import Client, sequential
from sglang_parse.cli import main as cli
from sglang_parse.cli.pair_page import verdicts
from sglang_parse.demo.load import open_session
from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.server import ParseConfig

CONFIG = {
    "target": "embedded:target",
    "draft": "embedded:draft",
    "server_args": ["--max-running-requests", "32"],
    "concurrency": [4],
    "warm_up": 1,
    "datasets": [{"name": "embedded", "problems": 8}],
    "arms": ["target", "cascade", "exact", "parse"],
}


class RunningServer:
    """Takes the place of launch.ServerProcess for a server that is up already."""

    def __init__(self, url):
        self.url = url

    def start(self):
        pass

    def wait_ready(self):
        pass

    def stop(self):
        pass

    def processes(self):
        return []


def test_arms_of_a_benchmark_on_real_servers(target, parse, tmp_path, monkeypatch):
    def make_server(flags, name, log, timeout_s):
        return RunningServer((parse if "PARSE" in flags else target).url)

    monkeypatch.setattr(arm_servers, "make_server", make_server)
    config = read_config({**CONFIG, "out": str(tmp_path)})
    report = run.run_benchmark(config).read_text()
    cells = plan.plan_cells(
        config, {s: plan.load_set(config, s) for s in plan.data_sets(config)}
    )
    store = CellStore(tmp_path)
    results = [store.read(cell) for cell in cells]
    for result in results:  # SGLang still names what we store of its servers
        for facts in result.provenance["servers"].values():
            assert None not in facts.values(), facts
    found = {r.cell.arm: r.answers for r in results}
    texts = {arm: [a.text for (a,) in answers] for arm, answers in found.items()}
    assert texts["exact"] == texts["target"]
    for (cascaded,), text in zip(found["cascade"], texts["target"], strict=True):
        assert len(cascaded.rounds) >= 1
        kept = cascaded.counters["kept_tokens"] > 0
        assert kept == (min(cascaded.rounds[0].scores) >= 0.5)
        assert kept or cascaded.text == text
    figures = {
        f["arm"]: f
        for f in json.loads((tmp_path / "summary.json").read_text())["figures"]
    }
    assert figures["exact"]["difference"]["points"] == 0
    assert figures["parse"]["judge"]["auc"] > 0.9
    assert figures["parse"]["accept_length"] > figures["exact"]["accept_length"] > 1
    assert all(f"| {arm} |" in report for arm in found)


def test_report_on_a_pair(target, parse, tmp_path):
    """Red if the page counts answers, drafts or verdicts of other requests than its
    own, or does not take the target alone from the other server."""
    page, num = tmp_path / "report.html", 8
    urls = ["--url", parse.url, "--target-url", target.url]
    sizes = ["--problems", str(num), "--concurrency", "4", "--margin", "30"]
    assert cli.main(["report", *urls, *sizes, "--out", str(page)]) == 0
    text = page.read_text()
    found = json.loads(re.findall(r'id="figures">(.*?)</script>', text, re.DOTALL)[0])
    arms, counts = found["arms"], found["counts"]
    assert arms["exact"]["answers with the target's tokens"] == num
    alone, exact, served = (
        arms[name]["mean log-probability"] for name in ("target alone", *list(arms)[1:])
    )
    assert alone == exact and -1 < served < 0
    assert found["target alone"] == target.url
    assert counts["tokens kept"] <= counts["tokens drafted"]
    assert counts["segments judged"] >= num
    right, wrong = verdicts(found["planted"])
    assert sum(right) / len(right) > 0.7 > 0.5 > sum(wrong) / len(wrong)
    assert "percentage points" in text and text.count("<svg") == 2
    assert cli.main(["report", "--url", target.url, *sizes, "--out", str(page)]) == 1


def test_sequential_arm_with_the_target_as_draft_is_the_target(
    target, tokenizer, prompts
):
    """Its own steps pass its own judge, so the client's loop must change nothing."""
    config = ParseConfig()
    judge = build_judge_prompt(tokenizer, config.judge_suffix, config.verdict_pairs)

    async def ask():
        async with open_session(1) as session:
            client = Client(
                session=session,
                urls={"draft": target.url, "target": target.url},
                options={},
                temperature=0.0,
                max_new_tokens=200,
                threshold=0.5,
                step_stop="\n",
                suffix=judge.suffix,
                verdict_ids=judge.verdict_ids,
                decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            )
            return await sequential(client, prompts[0])

    answer = asyncio.run(ask())
    alone = target.generate(prompts[0], max_new_tokens=200)
    assert answer.text == alone["text"]
    assert answer.num_tokens == alone["meta_info"]["completion_tokens"]
    steps = answer.text.count("\n") + 1
    assert answer.counters["kept_segments"] == steps == answer.target_passes
    assert all(score > 0.5 for r in answer.rounds for score in r.scores)
