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

from benchmarks import embedded_answers
from benchmarks.harness import arm_servers, measure, plan, plots, run
from benchmarks.harness.cells import Cell, CellResult, CellStore
from benchmarks.harness.config import load_config
from benchmarks.harness.conversation import Chat
from benchmarks.harness.grade import prefix_is_valid
from benchmarks.harness.plan import load_set, plan_cells
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
from sglang_parse.embedded import task
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
    assert len(only.ends) == len(embedded_answers.split_segments(draft_text(SLIPS)))
    assert only.num_kept == only.ends[-1]  # a fake threshold of 0.5 keeps all
    assert 0 < answer.ttft_s <= answer.latency_s


@pytest.mark.parametrize(("problem", "kept"), [(CLEAN, True), (SLIPS, False)])
def test_cascade_keeps_the_whole_draft_or_regenerates_it(problem, kept):
    with FakeServer("parse") as judge, FakeServer("target") as target:
        answer = ask(cascade, {"judge": judge, "target": target}, problem)
    right = embedded_answers.render_answer(problem, "A")
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
    steps = embedded_answers.split_segments(draft_text(problem))
    right = embedded_answers.split_segments(
        embedded_answers.render_answer(problem, "A")
    )
    expected = [
        step if step in gold else own
        for step, own, gold in zip(
            steps, right, embedded_answers.gold_segments(problem), strict=True
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
    right = embedded_answers.render_answer(
        problem, ["A1", "B2", *["A1"] * 5][: len(problem.events)]
    )
    assert all(prefix_is_valid(problem, right[:n]) for n in range(len(right) + 1))
    wrong = right.replace("Step 2", "Step 3", 1)
    assert not prefix_is_valid(problem, wrong[: wrong.index("Step 3") + 6])
    assert prefix_is_valid(problem, wrong[: wrong.index("Step 3") + 5])
    assert not prefix_is_valid(problem, right + "\nMore")


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

    monkeypatch.setattr(plots, "write_plots", lambda *_: [])
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


def test_another_repeat_takes_its_turns_from_the_last_arm_on(events, tmp_path):
    text = LAPS[: LAPS.index("sweep:")].replace("[1, 3]", "[1]")
    run_benchmark(
        laps_config(tmp_path, 3, text + "boot_together: 3\nlaps: 3\nrepeats: 2\n")
    )
    arms = ("target", "parse", "exact")
    assert in_groups(events) == rotation(*arms) + rotation(*reversed(arms))


@pytest.mark.parametrize("laps", [1, 5])
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


@pytest.mark.parametrize(
    ("num_items", "laps", "sizes"),
    [(200, 4, [50] * 4), (10, 4, [2, 3, 2, 3]), (2, 5, [1, 1]), (7, 1, [7])],
)
def test_parts_are_contiguous_and_equal_but_for_one_item(num_items, laps, sizes):
    parts = measure.cut(num_items, laps)
    assert [len(part) for part in parts] == sizes
    assert [k for part in parts for k in part] == [*range(num_items)]


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
