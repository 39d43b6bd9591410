"""The benchmark's procedures, cells and report, against fake servers."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import arm_servers, measure, plan, run
from benchmarks.harness import arms as arms_module
from benchmarks.harness.__main__ import main
from benchmarks.harness.arms import ARMS, Models, arm_draft, make_hostile_draft, refusal
from benchmarks.harness.cells import Cell, CellResult, CellStore
from benchmarks.harness.config import load_config
from benchmarks.harness.conversation import Chat
from benchmarks.harness.datasets import load_items
from benchmarks.harness.grade import grade_cell, prefix_is_valid
from benchmarks.harness.measure import hub_commit
from benchmarks.harness.plan import load_set, plan_cells
from benchmarks.harness.plots import spread
from benchmarks.harness.procedures import (
    Answer,
    Client,
    Round,
    cascade,
    plain,
    read_rounds,
    sequential,
)
from benchmarks.harness.run import run_benchmark
from benchmarks.harness.stats import tango_interval
from benchmarks.harness.summary import (
    Graded,
    ItemResult,
    over_repeats,
    summarise_cells,
)
from sglang_parse.demo.load import LoadError, open_session
from sglang_parse.embedded import DRAFT_PATH, task
from tests.support.fake_sglang import (
    JUDGE,
    NO,
    YES,
    CharTokenizer,
    FakeServer,
    draft_text,
    slips,
)

CONFIG = """
out: {out}
target: embedded:target
draft: embedded:draft
server_args: [--max-running-requests, "8"]
concurrency: [1, 3]
datasets:
  - {{name: embedded, problems: 12}}
arms: [target, parse]
sweep:
  arm: parse
  dataset: {{name: embedded, problems: 6}}
  concurrency: 3
  grid: [{{parse_threshold: [0.5, 0.9]}}]
"""
CHAT = Chat(CharTokenizer(), {})
ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "benchmarks" / "configs"
PROBLEMS = task.make_problems(12, 64)


def write_config(folder, text=CONFIG):
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(text.format(out=folder / "out"))
    return path


@pytest.fixture
def fakes(monkeypatch):
    """Fake servers instead of real ones; collects those that were started."""
    started = []

    def make(flags, name, log, timeout_s):
        server = FakeServer("parse" if "PARSE" in flags else "target")
        started.append((name, flags, server))
        return server

    monkeypatch.setattr(arm_servers, "make_server", make)
    monkeypatch.setattr(run, "load_tokenizer", lambda path: CharTokenizer())
    return started


def ask(procedure, roles, problem, **changes):
    """One answer of a procedure; roles: fake servers by role."""

    async def go():
        async with open_session(4) as session:
            fields = {
                "session": session,
                "urls": {role: s.url for role, s in roles.items()},
                "options": {"parse_report": True},
                "temperature": 0.0,
                "max_new_tokens": 500,
                "threshold": 0.7,
                "step_stop": "\n",
                "suffix": (JUDGE,),
                "verdict_ids": ((YES, NO),),
                "decode": CHAT.decode,
            }
            client = Client(**{**fields, **changes})
            message = {"role": "user", "content": problem.prompt}
            return await procedure(client, CHAT.encode([message]))

    return asyncio.run(go())


SLIPS = next(p for p in PROBLEMS if slips(p))
CLEAN = next(p for p in PROBLEMS if not slips(p))


def test_plain_answer_carries_counters_and_rounds():
    with FakeServer("parse") as server:
        answer = ask(plain, {"main": server}, SLIPS)
    assert answer.text == draft_text(SLIPS)
    assert (answer.target_passes, answer.counters["draft_tokens"]) == (2, 40)
    (only,) = answer.rounds
    assert len(only.ends) == len(task.split_segments(draft_text(SLIPS)))
    assert only.num_kept == only.ends[-1]  # a fake threshold of 0.5 keeps all
    assert 0 < answer.ttft_s <= answer.latency_s


def test_plain_answer_of_stock_server_counts_a_pass_a_token():
    with FakeServer("target") as server:
        answer = ask(plain, {"main": server}, CLEAN)
    assert answer.target_passes == answer.num_tokens - 1 and not answer.counters


@pytest.mark.parametrize(("problem", "kept"), [(CLEAN, True), (SLIPS, False)])
def test_cascade_keeps_the_whole_draft_or_regenerates_it(problem, kept):
    with FakeServer("parse") as judge, FakeServer("target") as target:
        answer = ask(cascade, {"judge": judge, "target": target}, problem)
    right = task.render_answer(problem, "A")
    assert answer.text == (draft_text(problem) if kept else right)
    assert len(target.bodies) == (0 if kept else 1)
    passes = 2 + (0 if kept else len(right))
    assert answer.target_passes == passes
    custom = judge.bodies[0]["sampling_params"]["custom_params"]
    assert custom["parse_threshold"] == 0 and custom["parse_exact_tail"] is False
    # Nothing is shown before the verdict.
    if kept:
        assert answer.ttft_s == answer.latency_s
    else:
        assert answer.counters["kept_tokens"] == 0
        assert all(r.num_kept == 0 for r in answer.rounds)


@pytest.mark.parametrize("problem", [CLEAN, SLIPS])
def test_sequential_judges_every_step_and_lets_the_target_write_failed_ones(problem):
    with FakeServer("draft") as draft, FakeServer("target") as target:
        answer = ask(sequential, {"draft": draft, "target": target}, problem)
    steps = task.split_segments(draft_text(problem))
    right = task.split_segments(task.render_answer(problem, "A"))
    expected = [
        step if step in gold else own
        for step, own, gold in zip(
            steps, right, task.gold_segments(problem), strict=True
        )
    ]
    assert answer.text == "".join(expected) and task.check_answer(problem, answer.text)
    failed = sum(e != s for e, s in zip(expected, steps, strict=True))
    assert bool(failed) == slips(problem)
    judged = [b for b in target.bodies if "token_ids_logprob" in b]
    assert len(judged) == len(steps) == answer.counters["judged_segments"]
    assert len(target.bodies) - len(judged) == failed
    assert answer.counters["kept_segments"] == len(steps) - failed
    # Every verdict is about all of the answer so far.
    question = CHAT.encode([{"role": "user", "content": problem.prompt}])
    assert judged[0]["input_ids"] == [*question, *map(ord, steps[0]), JUDGE]
    assert answer.num_tokens == len(answer.text) + 1


def test_sequential_ends_at_the_token_limit():
    with FakeServer("draft") as draft, FakeServer("target") as target:
        servers = {"draft": draft, "target": target}
        answer = ask(sequential, servers, CLEAN, max_new_tokens=20)
    first = task.split_segments(draft_text(CLEAN))[0]
    assert len(first) > 20 and answer.text == first
    assert draft.bodies[0]["sampling_params"]["max_new_tokens"] == 20


def test_rounds_are_split_where_the_target_writes():
    def segment(ids, score, outcome="kept", origin="draft", start=0):
        return {
            "token_ids": ids,
            "score": score,
            "outcome": outcome,
            "origin": origin,
            "start": start,
        }

    own = segment([9], None, "written", "target", 3)
    rounds = read_rounds(
        [
            segment([1, 2], 0.9, start=1),
            segment([3], 0.1, "rejected", start=3),
            own,
            segment([4], None, start=4),  # the exact tail has no verdict
            own,
            segment([5, 6], 0.8, start=6),
            own,
            # A recovering target denied 7; 8 was judged behind it all the same.
            segment([7], None, "rejected", start=9),
            segment([8], 0.7, "rejected", start=9),
            own,
            segment([1], None, start=10),  # it agreed with 1
            segment([2], 0.6, start=11),
            own,
        ]
    )
    assert rounds == (
        Round(1, (1, 2, 3), (2, 3), (0.9, 0.1), 2),
        Round(6, (5, 6), (2,), (0.8,), 2),
        Round(9, (7, 8), (2,), (0.7,), 0),
        Round(11, (2,), (1,), (0.6,), 1),
    )


def test_gold_of_prefixes_that_end_inside_a_segment():
    problem = CLEAN
    right = task.render_answer(
        problem, ["A1", "B2", *["A1"] * 5][: len(problem.events)]
    )
    assert all(prefix_is_valid(problem, right[:n]) for n in range(len(right) + 1))
    wrong = right.replace("Step 2", "Step 3", 1)
    assert not prefix_is_valid(problem, wrong[: wrong.index("Step 3") + 6])
    assert prefix_is_valid(problem, wrong[: wrong.index("Step 3") + 5])
    assert not prefix_is_valid(problem, right + "\nMore")


def test_hub_models_are_named_by_their_commit(tmp_path, monkeypatch):
    """What `hub_commit` finds in a cache laid out as the hub's library lays it out."""
    repo = tmp_path / "models--org--name"
    for commit, ref in (("c0ffee", "main"), ("deca", "v2")):
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert hub_commit("org/name") == "c0ffee"
    assert hub_commit("org/name", "v2") == "deca"
    assert hub_commit(str(repo / "snapshots" / "deca")) == "deca"
    assert hub_commit("org/other") == hub_commit("no/hub/name") == ""
    assert hub_commit(str(tmp_path)) == ""


def test_run_writes_every_cell_its_report_and_repeats_nothing(fakes, tmp_path, capsys):
    path = write_config(tmp_path)
    report = run_benchmark(load_config(path))
    assert [name for name, _, _ in fakes] == ["target-main", "parse-main"]
    assert all("--max-running-requests" in flags for _, flags, _ in fakes)
    config = load_config(path)
    cells = plan_cells(config, {s: load_set(config, s) for s in plan.data_sets(config)})
    assert len(cells) == 2 * 2 + 2
    store = CellStore(config.out)
    first = store.read(cells[0])
    assert [i for i in first.ids] == [f"embedded-{k}" for k in range(12)]
    assert first.provenance["versions"]["sglang"] and first.wall_s > 0
    assert first.provenance["servers"]["main"]["attention_backend"] == "fake"
    assert first.provenance["servers"]["main"]["hub_commits"] == {}
    # Warm-up answers are not among them.
    assert len(fakes[0][2].bodies) == (12 + 8) * 2
    text = report.read_text()
    right = sum(not slips(p) for p in PROBLEMS)
    assert re.search(rf"\| parse \| {100 * right / 12:.1f} ", text)
    lost = 100 * (right - 12) / 12
    assert f"{lost:+.1f} (" in text
    assert '"attention_backend": "fake"' in text
    assert "| threshold=0.9 | 100.0 " in text
    summary = json.loads((config.out / "summary.json").read_text())["figures"]
    judge = next(f for f in summary if f["arm"] == "parse")["judge"]
    assert judge["false_accept"] == 1 and judge["false_reject"] == 0
    assert judge["auc"] == 1
    for name in ("speedup-embedded", "latency-embedded", "sweep", "judge"):
        assert (config.out / f"{name}.svg").stat().st_size > 1000
    before = len(fakes)
    again = run_benchmark(load_config(path)).read_text()
    assert len(fakes) == before and again == text


def test_finished_cell_of_other_settings_is_refused(fakes, tmp_path):
    text = CONFIG.replace("[1, 3]", "[1]").replace("[target, parse]", "[target]")
    text = text[: text.index("sweep:")]
    run_benchmark(load_config(write_config(tmp_path, text)))
    other = write_config(tmp_path, text + "seed: 65\n")
    with pytest.raises(ValueError, match=r"with other settings \(items, seed\)"):
        run_benchmark(load_config(other))
    assert len(fakes) == 1


def test_failing_request_names_the_cell_and_leaves_it_unfinished(
    fakes, tmp_path, monkeypatch
):
    def fail(self, body):
        raise ConnectionError

    monkeypatch.setattr(FakeServer, "answer", fail)
    path = write_config(tmp_path)
    with pytest.raises(LoadError, match="target/embedded-c1-r0: .*generate failed"):
        run_benchmark(load_config(path))
    assert not list((tmp_path / "out").rglob("*.gz"))


COLUMNS_OF_TIME = ("answer_ratio", "token_ratio", "ratio_by_repeat")


def untimed(folder):
    """What of a run's summary does not depend on the clock."""
    figures = json.loads((folder / "out" / "summary.json").read_text())["figures"]
    for f in figures:
        for name in COLUMNS_OF_TIME:
            f.pop(name)
        f["figures"] = {
            k: v for k, v in f["figures"].items() if not k.endswith(("_s", "ratio"))
        }
    return figures


def child(config, delay_s):
    script = ROOT / "benchmarks" / "tests" / "bench_child.py"
    return subprocess.Popen(
        [sys.executable, str(script), str(config), str(delay_s)],
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def is_half_done(cells):
    """Whether a cell is finished, its partial file gone, and another half done."""
    finished = {p.with_suffix("") for p in cells.rglob("*.gz")}
    try:
        sizes = {p.with_suffix(""): p.stat().st_size for p in cells.rglob("*.partial")}
    except FileNotFoundError:  # just finished
        return False
    return (
        finished and not finished & set(sizes) and max(sizes.values(), default=0) > 4000
    )


@pytest.mark.parametrize("more", ["", "laps: 3\nboot_together: 2\n"])
def test_killed_run_continues_and_gives_the_same_table(fakes, tmp_path, more):
    run_benchmark(load_config(write_config(tmp_path / "whole")))
    config = write_config(tmp_path / "killed", CONFIG + more)
    cells = tmp_path / "killed" / "out" / "cells"
    process = child(config, 0.05)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if is_half_done(cells):
                break
            time.sleep(0.01)
        assert process.poll() is None, process.stderr.read().decode()
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    finished = {p: p.read_bytes() for p in cells.rglob("*.gz")}
    assert 1 <= len(finished) < 6
    run_benchmark(load_config(config))
    assert not list(cells.rglob("*.partial")) and len(list(cells.rglob("*.gz"))) == 6
    assert all(p.read_bytes() == data for p, data in finished.items())
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")


def test_grades_of_a_set_without_gold_leave_accuracy_open(fakes, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p.prompt} for p in PROBLEMS]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    text = CONFIG[: CONFIG.index("sweep:")].replace(
        "{{name: embedded, problems: 12}}",
        f"{{{{name: prompts, path: {prompts}, max_new_tokens: 300}}}}",
    )
    report = run_benchmark(load_config(write_config(tmp_path / "run", text)))
    assert re.search(r"\| parse \| - \| - \| \d", report.read_text())


@pytest.mark.parametrize(
    ("arm", "eagle", "has_gpu", "message"),
    [
        ("standalone", "", False, "'standalone' needs a CUDA device"),
        ("eagle3", "", True, "needs an EAGLE-3 head"),
        ("eagle3", "head", False, ""),
        ("sglang-eagle3", "", True, "needs an EAGLE-3 head"),
        ("sglang-eagle3", "head", False, "needs a CUDA device"),
        ("parse-eagle3", "head", False, ""),
        ("parse", "", False, ""),
    ],
)
def test_arms_that_cannot_run_are_refused_with_a_sentence(arm, eagle, has_gpu, message):
    reason = refusal(ARMS[arm], Models("t", "d", eagle), has_gpu=has_gpu)
    assert message in reason and bool(reason) == bool(message)


def test_hostile_draft_has_the_same_rows_in_another_order(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(arms_module.tempfile, "tempdir", str(tmp_path))
    ours = load_file(make_hostile_draft(str(DRAFT_PATH)) / "model.safetensors")
    theirs = load_file(DRAFT_PATH / "model.safetensors")
    head, original = ours.pop("lm_head.weight"), theirs.pop("lm_head.weight")
    assert all(ours[k].equal(theirs[k]) for k in theirs) and len(ours) == len(theirs)
    assert not head.equal(original)
    assert head.sum(1).sort()[0].allclose(original.sum(1).sort()[0])


def test_a_tied_draft_in_shards_gets_a_shuffled_head_of_its_own(tmp_path, monkeypatch):
    """Red if the usual small drafts (shards, tied embeddings) cannot be made hostile,
    or their embeddings are shuffled with the head."""
    from safetensors.torch import load_file, save_file

    embeddings = torch.arange(12.0).view(6, 2)
    source = tmp_path / "draft"
    source.mkdir()
    save_file({"model.embed_tokens.weight": embeddings}, source / "a-1.safetensors")
    save_file({"model.norm.weight": torch.ones(2)}, source / "a-2.safetensors")
    (source / "config.json").write_text('{"tie_word_embeddings": true, "x": 1}')
    index = source / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "a-2.safetensors"}}')
    monkeypatch.setattr(arms_module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", {"some/draft": str(source)}.get
    )
    out = make_hostile_draft("some/draft")
    found = load_file(out / "a-1.safetensors")
    assert found["model.embed_tokens.weight"].equal(embeddings)
    head = found["lm_head.weight"]
    assert not head.equal(embeddings) and head.sort(0)[0].equal(embeddings)
    config = json.loads((out / "config.json").read_text())
    assert config == {"tie_word_embeddings": False, "x": 1}
    listed = json.loads((out / index.name).read_text())["weight_map"]
    assert listed["lm_head.weight"] == "a-1.safetensors"
    assert make_hostile_draft("some/draft") == out
    (source / "a-1.safetensors").unlink()
    with pytest.raises(ValueError, match="'some/draft' cannot be shuffled"):
        make_hostile_draft("some/draft")


def test_rated_answers_are_averaged_and_graded_once(monkeypatch):
    from benchmarks.harness import grade

    asked = []

    def rate(item, texts, judge):
        asked.append((item.id, list(texts), dict(judge)))
        return 7.0

    monkeypatch.setattr(grade, "rate", rate)
    (item,) = load_items("embedded", problems=1, seed=1)

    class Result:
        class cell:  # noqa: N801
            dataset = name = "mt-bench"

        ids = (item.id,)
        answers = ((type("A", (), {"text": "hello"}),),)

    grades = grade_cell(Result, [item], decode=CHAT.decode, judge={"url": "http://j"})
    assert grades["ratings"] == [7.0] and grades["correct"] == [None]
    assert asked == [(item.id, ["hello"], {"url": "http://j"})]
    monkeypatch.setattr(grade.time, "sleep", lambda s: None)
    answers = iter([TimeoutError("busy"), KeyError("choices"), 4.0])
    monkeypatch.setattr(grade, "rate", lambda *_: raise_or_give(next(answers)))
    assert grade.rate_patiently(item, ["hello"], {}) == 4.0
    turns = {1: 4.0, 2: 9.0}
    monkeypatch.setattr(grade, "rate", lambda _, texts, __: turns[len(texts)])
    assert grade.rate_patiently(item, ["first", "second"], {}) == 6.5
    monkeypatch.setattr(grade, "rate", lambda _, texts, __: {1: 4.0}.get(len(texts)))
    assert grade.rate_patiently(item, ["first", "second"], {}) is None
    monkeypatch.setattr(grade, "rate", lambda *_: raise_or_give(TimeoutError("gone")))
    assert grade.rate_patiently(item, ["hello"], {}) is None
    # Only what was not rated is asked for again.
    assert grade.lacks_ratings({"ratings": [7.0, None]})
    assert not grade.lacks_ratings({"ratings": [7.0]})
    assert not grade.lacks_ratings({"ratings": None})
    Result.ids, Result.answers = (item.id,) * 2, Result.answers * 2
    monkeypatch.setattr(grade, "rate", lambda *_: 3.0)
    grades = grade_cell(
        Result,
        [item, item],
        decode=CHAT.decode,
        judge={"url": "http://j"},
        ratings=[7.0, None],
    )
    assert grades["ratings"] == [7.0, 3.0]
    Result.ids = ("another",)
    with pytest.raises(ValueError, match="measured on other items"):
        grade_cell(Result, [item], decode=CHAT.decode, judge={})


def raise_or_give(value):
    if isinstance(value, Exception):
        raise value
    return value


def test_grades_are_of_one_result_and_one_rater(tmp_path):
    """Red if a cell that is measured again keeps the grades of the one before, or
    answers rated by one model count as another's."""
    store = CellStore(tmp_path)
    cell = graded_cell(0, [(True, 1, 1.0)]).cell
    for text in ("one", "two"):
        with store.writing(cell, {}) as writer:
            writer.line({"wall_s": 1.0, "text": text})
        store.finish([cell])
        assert store.read_grades(cell, "a model") is None
        store.write_grades(cell, {"correct": [text]}, "a model")
        assert store.read_grades(cell, "a model") == {"correct": [text]}
        assert store.read_grades(cell) is None
    rewritten = store.path(cell).read_bytes() + b"\0"
    store.path(cell).write_bytes(rewritten)
    assert store.read_grades(cell, "a model") is None


def test_arms_that_boot_together_are_measured_one_by_one(fakes, tmp_path):
    text = (
        CONFIG[: CONFIG.index("sweep:")].replace("[1, 3]", "[3]") + "boot_together: 2\n"
    )
    report = run_benchmark(load_config(write_config(tmp_path, text)))
    assert [name for name, _, _ in fakes] == ["target-main", "parse-main"]
    # Warm-up and problems, each server its own arm's.
    assert [len(server.bodies) for _, _, server in fakes] == [12 + 8] * 2
    assert "| parse |" in report.read_text()


LAPS = CONFIG.replace("[target, parse]", "[target, parse, exact]") + (
    "boot_together: 3\nlaps: {laps}\n"
)
WARM_UP, FLUSH = "warm-up", "flush"


def laps_config(folder, laps, text=LAPS):
    return load_config(write_config(folder, text.replace("{laps}", str(laps))))


@pytest.fixture
def events(fakes, monkeypatch):
    """What servers were asked, as (server's name, number of the problem), with
    WARM_UP and FLUSH in place of a number."""
    found = []
    flush, answer = measure.flush_cache, FakeServer.answer
    numbers = {p.prompt: k for k, p in enumerate(PROBLEMS)}

    def name_of(url):
        return next(name for name, _, server in fakes if server.url == url)

    async def flushed(url):
        found.append((name_of(url), FLUSH))
        await flush(url)

    def answered(self, body):
        text = CHAT.decode(body["input_ids"])
        prompt = text.removeprefix("<user>").removesuffix("<assistant>")
        found.append((name_of(self.url), numbers.get(prompt, WARM_UP)))
        return answer(self, body)

    monkeypatch.setattr(measure, "flush_cache", flushed)
    monkeypatch.setattr(FakeServer, "answer", answered)
    return found


def in_groups(events):
    """(arm, the problems asked without a break); a warm-up as (arm, None).

    Every part must lie behind a flush of its own server."""
    groups, flushed = [], None
    for (server, is_flush, is_warm), group in itertools.groupby(
        events, lambda e: (e[0], e[1] == FLUSH, e[1] == WARM_UP)
    ):
        arm = server.removesuffix("-main")
        if is_flush:
            assert len(list(group)) == 1
            flushed = arm
        elif is_warm:
            groups.append((arm, None))
        else:
            assert flushed == arm
            flushed = None
            groups.append((arm, sorted(number for _, number in group)))
    return groups


def rotation(*arms):
    """Groups of a cell of 12 problems in 3 laps."""
    first = [group for arm in arms for group in ((arm, None), (arm, [0, 1, 2, 3]))]
    second = [(arm, [4, 5, 6, 7]) for arm in reversed(arms)]
    return first + second + [(arm, [8, 9, 10, 11]) for arm in arms]


def swept():
    return [("parse", None), ("parse", [*range(6)])] * 2


def test_arms_take_turns_by_laps_and_so_do_settings_of_a_sweep(events, tmp_path):
    run_benchmark(laps_config(tmp_path, 3))
    arms = ("target", "parse", "exact")
    settings = [("parse", None), ("parse", [0, 1])] * 2
    settings += [("parse", [2, 3])] * 2 + [("parse", [4, 5])] * 2
    assert in_groups(events) == rotation(*arms) + rotation(*arms) + settings


def test_the_baseline_takes_turns_with_every_group_of_arms(events, tmp_path):
    """Red if an arm's ratio is to a target that was measured at another time."""
    text = (
        LAPS[: LAPS.index("sweep:")]
        .replace("[1, 3]", "[1]")
        .replace("[target, parse, exact]", "[target, exact, parse, parse-no-tail]")
        + "boot_together: 2\nlaps: 3\n"
    )
    config = laps_config(tmp_path, 3, text)
    run_benchmark(config)
    second = ("target", "parse", "parse-no-tail")
    assert in_groups(events) == rotation("target", "exact") + rotation(*second)
    cells = config.out / "cells"
    assert {str(p.relative_to(cells)) for p in cells.rglob("*.gz")} == {
        "exact/embedded-c1-r0.jsonl.gz",
        "parse-no-tail/embedded-c1-r0.jsonl.gz",
        "parse/embedded-c1-r0.jsonl.gz",
        "target/embedded-c1-r0-beside1.jsonl.gz",
        "target/embedded-c1-r0.jsonl.gz",
    }
    (cells / "parse" / "embedded-c1-r0.jsonl.gz").unlink()
    events.clear()
    run_benchmark(config)
    assert in_groups(events) == rotation("parse")


def test_the_baseline_is_asked_beside_others_only_what_they_are(fakes, tmp_path):
    text = CONFIG[: CONFIG.index("sweep:")].replace(
        "[target, parse]", "[target, {{name: parse, concurrency: [3]}}]"
    )
    config = load_config(write_config(tmp_path, text + "laps: 2\n"))
    assert config.concurrency == (1, 3)
    items = {s: load_set(config, s) for s in plan.data_sets(config)}
    assert [cell.name for cell in plan_cells(config, items)] == [
        *("target/embedded-c1-r0", "target/embedded-c3-r0"),
        *("target/embedded-c3-r0-beside1", "parse/embedded-c3-r0"),
    ]


def test_another_repeat_takes_its_turns_from_the_last_arm_on(events, tmp_path):
    text = LAPS[: LAPS.index("sweep:")].replace("[1, 3]", "[1]")
    run_benchmark(
        laps_config(tmp_path, 3, text + "boot_together: 3\nlaps: 3\nrepeats: 2\n")
    )
    arms = ("target", "parse", "exact")
    assert in_groups(events) == rotation(*arms) + rotation(*reversed(arms))


@pytest.mark.parametrize("more", ["", "laps: 1\n"])
def test_without_laps_an_arm_is_measured_to_its_end(events, tmp_path, more):
    text = LAPS.replace("laps: {laps}\n", more)
    run_benchmark(load_config(write_config(tmp_path, text)))

    def whole(arm):
        return [(arm, None), (arm, [*range(12)])] * 2

    expected = whole("target") + whole("parse") + swept() + whole("exact")
    assert in_groups(events) == expected


@pytest.mark.parametrize("laps", [1, 3, 5])
def test_wall_clock_of_a_cell_is_that_of_its_own_parts(
    events, tmp_path, laps, monkeypatch
):
    """Red if a cell's clock runs while other arms answer, or is the last part's."""

    def answers():  # one second each
        return float(sum(what != FLUSH for _, what in events))

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=answers))
    config = laps_config(tmp_path, laps)
    run_benchmark(config)
    items = {s: load_set(config, s) for s in plan.data_sets(config)}
    store = CellStore(config.out)
    results = [store.read(cell) for cell in plan_cells(config, items)]
    assert [r.wall_s for r in results] == [float(r.cell.num_items) for r in results]
    for result in results:
        assert result.ids == tuple(
            f"embedded-{k}" for k in range(result.cell.num_items)
        )
        assert len(result.provenance["load_average"]) == 3
        assert result.provenance["servers"]["main"]["attention_backend"] == "fake"


# Problem 5 is of the second lap, 9 of the last, which goes forwards.
@pytest.mark.parametrize("broken_at", [5, 9])
def test_cells_that_take_turns_are_finished_together(
    events, tmp_path, monkeypatch, broken_at
):
    """Red if a cell without all its parts counts as finished, others go on where they
    were, or are compared with a target that answered at another time."""
    answer = FakeServer.answer

    def fail(self, body):
        found = answer(self, body)
        if events[-1] == ("parse-main", broken_at):
            raise ConnectionError
        return found

    text = LAPS[: LAPS.index("sweep:")].replace("[1, 3]", "[1]")
    config = laps_config(tmp_path, 3, text + "boot_together: 3\nlaps: 3\n")
    with monkeypatch.context() as broken:
        broken.setattr(FakeServer, "answer", fail)
        with pytest.raises(LoadError, match="^parse/embedded-c1-r0: .*generate failed"):
            run_benchmark(config)
    assert not list(config.out.rglob("*.gz"))
    partial = {p.parent.name for p in config.out.rglob("*.partial")}
    assert partial == {"target", "parse", "exact"}
    events.clear()
    report = run_benchmark(config)
    assert in_groups(events) == rotation("target", "parse", "exact")
    assert len(list(config.out.rglob("*.gz"))) == 3
    assert not list(config.out.rglob("*.partial"))
    assert "another time" not in report.read_text()
    # What is gone is measured again, and told of.
    (config.out / "cells" / "parse" / "embedded-c1-r0.jsonl.gz").unlink()
    events.clear()
    report = run_benchmark(config)
    assert in_groups(events) == rotation("parse")
    told = "another time than the target that they are compared with: parse/embedded-c1"
    assert told in report.read_text()
    for name in ("target", "parse"):
        (config.out / "cells" / name / "embedded-c1-r0.jsonl.gz").unlink()
    report = run_benchmark(config).read_text()
    assert "compared with: exact/embedded-c1-r0.\n" in report


def test_other_problems_under_the_same_settings_are_refused(fakes, tmp_path):
    """Red if a data file that was edited gives later arms other problems than the
    first had, or a reference that was put right grades nothing anew."""
    rows = [{"prompt": p.prompt, "answer": "99"} for p in PROBLEMS[:3]]
    data = tmp_path / "rows.jsonl"

    def report_of(rows):
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run_benchmark(load_config(write_config(tmp_path, text))).read_text()

    text = CONFIG[: CONFIG.index("sweep:")].replace("[1, 3]", "[1]")
    text = re.sub(
        r"datasets:.*\n(?:  .*\n)*",
        f"datasets: [{{{{name: prompts, path: {data}}}}}]\n",
        text,
    )
    assert "| target | 0.0 (" in report_of(rows)
    for row, problem in zip(rows, PROBLEMS, strict=False):
        row["answer"] = str(problem.answer)
    assert "| target | 100.0 (" in report_of(rows)
    rows[0]["prompt"] = PROBLEMS[5].prompt
    with pytest.raises(ValueError, match=r"measured with other settings \(items\)"):
        report_of(rows)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 4)])
def test_cells_of_other_laps_are_refused(fakes, tmp_path, before, after):
    """Red if runs with other laps are mixed, or results from before there were laps
    are not those of one."""
    config = laps_config(tmp_path, before)
    run_benchmark(config)
    other = laps_config(tmp_path, after)
    items = {s: load_set(other, s) for s in plan.data_sets(other)}
    store = CellStore(other.out)
    for cell in plan_cells(other, items):
        assert cell.laps == after
        assert ("laps" in cell.spec) == (cell.laps > 1)
        with pytest.raises(ValueError, match=r"with other settings \(laps\)"):
            store.is_finished(cell)


@pytest.mark.parametrize(
    ("num_items", "laps", "sizes"),
    [(200, 4, [50] * 4), (10, 4, [2, 3, 2, 3]), (2, 5, [1, 1]), (7, 1, [7])],
)
def test_parts_are_contiguous_and_equal_but_for_one_item(num_items, laps, sizes):
    parts = measure.cut(num_items, laps)
    assert [len(part) for part in parts] == sizes
    assert [k for part in parts for k in part] == [*range(num_items)]


def test_models_alone_are_served_once_for_arms_that_boot_together(fakes, tmp_path):
    """Red if each arm of a batch boots the stock target anew, or PARSE arms share."""
    text = (
        CONFIG[: CONFIG.index("sweep:")]
        .replace("[1, 3]", "[3]")
        .replace("[target, parse]", "[target, draft, sequential, parse, parse-no-tail]")
    )
    config = load_config(write_config(tmp_path, text + "boot_together: 5\n"))
    with arm_servers.arm_servers(config.arms, config) as urls:
        names = [name for name, _, _ in fakes]
    assert names == ["target-main", "draft-main", "parse-main", "parse-no-tail-main"]
    assert urls["sequential"] == {
        "draft": urls["draft"]["main"],
        "target": urls["target"]["main"],
    }
    assert urls["parse"] != urls["parse-no-tail"]


def test_the_same_arms_are_up_together_in_every_repeat():
    """Red if arms that took turns in one run are apart in the next, or when it goes on
    after it was killed."""
    arms = [SimpleNamespace(name=name) for name in "abcde"]
    config = SimpleNamespace(arms=arms, repeats=2, boot_together=2)
    places = {"a": [0, 1, 2], "b": [0], "c": [1], "d": [1], "e": [2]}
    cells = [
        SimpleNamespace(arm=name, repeat=r, group=group)
        for r in (0, 1)
        for name, groups in places.items()
        for group in groups
    ]

    def together(pending):
        groups = plan.batches(config, pending)
        return ["".join(arm.name for arm in group) for group, _ in groups]

    assert together(cells) == ["ab", "acd", "ae", "ea", "dca", "ba"]
    assert together(cells[3:]) == ["b", "cd", "e", "ea", "dca", "ba"]
    assert together([c for c in cells if c.arm in "bd"]) == ["b", "d", "d", "b"]


def test_repeats_asked_for_later_are_added_on_fresh_servers(fakes, tmp_path):
    """Red if finished repeats are measured anew, or the report hides their range."""
    path = write_config(tmp_path)
    run_benchmark(load_config(path))
    out = tmp_path / "out"
    first = {p: p.read_bytes() for p in out.rglob("*.gz")}
    assert main([str(path), "--repeats", "3"]) == 0
    servers = ["target-main", "parse-main"]
    started = [name for name, _, _ in fakes]
    assert started == [*servers, *reversed(servers), *servers]
    assert all(p.read_bytes() == data for p, data in first.items())
    # The sweep is not repeated.
    assert len(list(out.rglob("*.gz"))) == len(first) + 2 * 4
    figures = json.loads((out / "summary.json").read_text())["figures"]
    (one,) = (
        f
        for f in figures
        if (f["arm"], f["concurrency"], f["is_sweep"]) == ("parse", 1, False)
    )
    ratios = one["ratio_by_repeat"]
    assert len(ratios) == 3 and one["figures"]["problems"] == 12
    assert f"; {min(ratios):.2f}-{max(ratios):.2f} |" in (out / "report.md").read_text()


def graded_cell(repeat, rows, arm="parse", options=None, **answer):
    """A measured and graded cell; rows: (right, tokens, seconds) per item."""
    made = [
        Answer(**{**EMPTY, **answer, "num_tokens": n, "latency_s": s})
        for _, n, s in rows
    ]
    spec = {"arm": {"options": options or {}}}
    cell = Cell(arm, "embedded", 1, repeat, len(rows), spec)
    ids = tuple(f"i{k}" for k in range(len(rows)))
    result = CellResult(cell, {}, ids, tuple((a,) for a in made), 1.0)
    judged = [[0.6, True, False], [0.8, False, True]]
    correct = [right for right, _, _ in rows]
    return Graded(result, {"correct": correct, "ratings": None, "judged": judged})


EMPTY = {"text": "", "token_ids": (), "ttft_s": 0.1, "target_passes": 1}
ROWS = [(k % 5 > 0, 10 + k, 1 + k / 7) for k in range(20)]
BASE = [(True, 12 + k, 3.0 + k % 3) for k in range(20)]


def test_repeats_of_the_same_items_narrow_no_interval():
    """Red if a repeat counts as new problems: three copies would look like 60."""

    def figures(num):
        cells = [graded_cell(r, BASE, "target") for r in range(num)]
        cells += [graded_cell(r, ROWS) for r in range(num)]
        return summarise_cells(cells, 0.5)[1]

    once, thrice = figures(1), figures(3)
    names = ("difference", "answer_ratio", "token_ratio", "tokens_per_answer")
    assert all(getattr(once, n) == pytest.approx(getattr(thrice, n)) for n in names[1:])
    assert once.difference == thrice.difference
    for name in ("problems", "accuracy", "accuracy_low", "accuracy_high"):
        assert getattr(once.figures, name) == getattr(thrice.figures, name)
    assert len(thrice.ratio_by_repeat) == 3


def test_item_over_repeats_is_its_mean():
    rows = [[(True, 10, 1.0), (True, 20, 4.0)], [(False, 14, 3.0), (True, 20, 2.0)]]
    cells = [graded_cell(r, one) for r, one in enumerate(rows)]
    assert over_repeats(cells) == {
        "i0": ItemResult(0.5, 12, 2.0),
        "i1": ItemResult(1.0, 20, 3.0),
    }
    (figures,) = summarise_cells(cells, 0.5)
    assert figures.figures.accuracy == 0.75 and figures.answer_ratio is None
    base = [graded_cell(r, [(True, 9, 9.0)] * 2, "target") for r in range(2)]
    difference = summarise_cells([*base, *cells], 0.5)[1].difference
    assert (difference.points, difference.lost, difference.gained) == (-25, 1, 0)
    # No narrower than the bootstrap's, -50 to 0, nor than one item lost of two.
    low, high = tango_interval(0, 1, 2)
    assert (difference.low, difference.high) == (100 * low, 100 * high)
    assert difference.low < -50 and difference.high > 0


def test_arms_own_threshold_decides_what_its_verdicts_were():
    def quality(options):
        (f,) = summarise_cells([graded_cell(0, ROWS, options=options)], 0.5)
        return f.judge.false_accept, f.judge.false_reject

    assert quality({}) == (1, 0)
    assert quality({"parse_threshold": 0.7}) == (1, 1)
    assert quality({"parse_threshold": 0.9}) == (0, 1)


def test_share_of_drafts_kept_counts_every_drafter():
    """Red if what the head drafted is in what was kept and not in what was drafted."""
    counters = {"draft_tokens": 6, "eagle_draft_tokens": 4, "kept_tokens": 8}
    (f,) = summarise_cells([graded_cell(0, ROWS, counters=counters)], 0.5)
    assert f.kept_share == 0.8


@pytest.mark.parametrize("arm", ["parse", "parse-eagle3", "target", "eagle3"])
def test_verdicts_are_asked_of_the_arms_that_give_some(arm, tmp_path):
    text = CONFIG[: CONFIG.index("sweep:")].replace("parse]", f"{arm}]")
    text = text.replace("target, target", "target") + "eagle: embedded:head\n"
    config = load_config(write_config(tmp_path, text))
    items = {s: load_set(config, s) for s in plan.data_sets(config)}
    cell = next(c for c in plan_cells(config, items) if c.arm == arm)
    job = measure.Job(cell, ARMS[arm], config, items[config.datasets[0]], {}, CHAT)
    options = measure.make_client(job, None).options
    assert options.get("parse_report", False) == (arm in ("parse", "parse-eagle3"))


@pytest.mark.parametrize("name", ["embedded", "passes", "paper"])
def test_shipped_configs_are_refused_up_front_or_not_at_all(name, monkeypatch):
    """Red if an arm of ours fails only when its server is to start, hours later."""
    monkeypatch.setattr(run, "gpu_names", lambda: ["a card"])
    monkeypatch.setattr(arms_module, "local_folder", lambda model: DRAFT_PATH)
    config = load_config(CONFIGS / f"{name}.yaml")
    run.check_arms(config)
    for arm in config.arms:
        arm_draft(arm, config.models)


def test_draft_that_cannot_be_had_is_refused_before_anything_starts(
    tmp_path, monkeypatch
):
    def fail(model):
        raise OSError("no route\nto it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    text = CONFIG.replace("draft: embedded:draft", "draft: some-hub/model")
    config = load_config(
        write_config(tmp_path, text.replace("parse]", "parse, hostile]"))
    )
    with pytest.raises(
        ValueError, match="'some-hub/model' is no folder and.*: no route$"
    ):
        run_benchmark(config)


def test_whiskers_hold_the_interval_and_every_repeat():
    assert spread((2.0, 1.9, 2.1), ()) == (2.0, 1.9, 2.1)
    assert spread((2.0, 1.9, 2.1), (1.5, 2.05)) == (2.0, 1.5, 2.1)
    assert spread((2.0, 1.9, 2.1), (1.95, 2.4)) == (2.0, 1.9, 2.4)


def test_an_arm_may_have_its_own_concurrency(tmp_path):
    """Red if an arm's own levels are ignored, or measured cells are lost to a change of
    them."""
    text = CONFIG[: CONFIG.index("sweep:")]
    own = text.replace("parse]", "{{name: parse, concurrency: [3]}}]")
    cells = {}
    for name, one in (("all", text), ("own", own)):
        config = load_config(write_config(tmp_path / name, one))
        items = {s: load_set(config, s) for s in plan.data_sets(config)}
        cells[name] = {c.name: c.spec for c in plan_cells(config, items)}
    assert [name.split("-r")[0] for name in cells["own"]] == [
        "target/embedded-c1",
        "target/embedded-c3",
        "parse/embedded-c3",
    ]
    assert all(cells["all"][name] == spec for name, spec in cells["own"].items())


def test_model_that_was_trained_anew_is_another_setting(tmp_path):
    weights = tmp_path / "model.safetensors"
    marks = []
    for data in (b"one", b"two", b"one"):
        weights.write_bytes(data)
        plan.fingerprint.cache_clear()
        marks.append(plan.fingerprint(str(tmp_path)))
    assert marks[0] == marks[2] != marks[1]
    assert plan.fingerprint("a-hub/name") == ""
