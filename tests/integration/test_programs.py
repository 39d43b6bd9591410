"""Each program of programs/ against the embedded pair, as a user runs it."""

import importlib
import json
import re
from pathlib import Path

import pytest

from benchmarks.embedded_answers import first_error, render_answer, split_segments
from sglang_parse.embedded.task import check_answer, make_problems
from tests.support.client import chat_ids

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(parse, monkeypatch, capsys):
    """main() of a program, what it printed, and the problems it works on by default."""
    monkeypatch.syspath_prepend(str(ROOT))
    common = importlib.import_module("programs.common")

    def call(name, *argv):
        program = importlib.import_module(f"programs.{name}")
        result = program.main(["--url", parse.url, *argv])
        call.printed = capsys.readouterr().out
        return result

    call.problems = make_problems(4, common.SEED)
    return call


def test_judged_steps_reach_the_answer(run):
    """Red if a step is lost, joined, or judged without the steps before it."""
    problem = run.problems[0]
    steps = run("judged_steps")
    text = "\n".join(step.text for step in steps)
    assert first_error(problem, text) is None and check_answer(problem, text)
    assert len(steps) == len(problem.events) + 1
    assert any(step.scores for step in steps)


def test_judged_steps_turn_exact_after_a_rejection(run):
    """Red if what became of a step does not steer the next call."""
    modes = {False: set(), True: set()}
    for k in range(4):
        steps = run("judged_steps", "--problem", str(k), "--threshold", "0.99")
        for step, following in zip(steps, steps[1:], strict=False):
            modes[bool(step.rejected)].add(following.mode)
    assert modes == {False: {"semantic"}, True: {"exact"}}


def test_grade_finds_the_first_wrong_step_in_one_pass(run):
    """Red if a judged prefix is another one, or takes a pass of its own."""
    grade = run("grade")
    assert f"2 of {len(grade.steps)} steps stand (1 pass).\n" in run.printed
    wrong = importlib.import_module("programs.grade").wrong_solution(run.problems[0])
    assert list(grade.steps) == split_segments(wrong)
    assert first_error(run.problems[0], wrong) == grade.num_right == 2
    assert grade.target_passes == 1
    assert min(grade.scores[:2]) > 0.5 > max(grade.scores[2:])


def test_grade_of_a_right_solution_is_full(run, tmp_path):
    problem = run.problems[1]
    file = tmp_path / "solution.txt"
    file.write_text(render_answer(problem, "A"))
    grade = run("grade", "--question", problem.prompt, "--solution", str(file))
    assert grade.num_right == len(grade.steps) == len(problem.events) + 1


def test_repair_keeps_the_valid_prefix_and_mends_the_rest(run):
    """Red if a repair starts anew, or keeps the step that was wrong."""
    problem = run.problems[0]
    failed = importlib.import_module("programs.grade").wrong_solution(problem)
    result = run("repair")
    valid = "".join(split_segments(failed)[:2])
    assert result.kept[0] == len(valid) and result.answer.startswith(valid)
    assert result.is_valid and check_answer(problem, result.answer)
    assert first_error(problem, result.answer) is None


# As in programs/README.md, of which `grade` has tests of its own.
COMMANDS = {
    "judged_steps": "--question QUESTION",
    "repair": "--problem 3",
    "repair of an answer": "--question QUESTION --answer FILE",
    "best_of_n": "--question QUESTION --n 2",
    "tool_draft": "--question QUESTION --draft FILE",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_print_the_targets_answer(
    run, target, tokenizer, tmp_path, command
):
    """Red if a command prints another answer than the target gives alone."""
    problem, file = run.problems[3], tmp_path / "text.txt"
    file.write_text(importlib.import_module("programs.grade").wrong_solution(problem))
    words = {"QUESTION": problem.prompt, "FILE": str(file)}
    argv = [words.get(word, word) for word in COMMANDS[command].split()]
    run(command.split()[0], *argv)
    alone = target.generate(chat_ids(tokenizer, problem.prompt))["text"].split("\n")
    (answer,) = [line for line in alone if line.startswith("Answer:")]
    assert re.search(rf"{re.escape(answer)}\b", run.printed)


def test_best_of_n_shares_judged_prefixes(run, parse):
    """Red if the branches do not end in a valid answer of their problem."""
    problem = run.problems[0]
    best = run("best_of_n", "--n", "3", "--temperature", "0.5")
    assert best.is_valid and check_answer(problem, best.answer)
    assert first_error(problem, best.answer) is None
    assert best.weakest > 0.5


@pytest.mark.parametrize(("k", "num_right"), [(0, 2), (8, 1)])
def test_tool_draft_is_kept_up_to_its_error(run, k, num_right):
    """Red if the tool's right steps are written again, its wrong ones kept, or the end
    of a wrong one where the target wrote its beginning."""
    problem = make_problems(k + 1, importlib.import_module("programs.common").SEED)[-1]
    program = importlib.import_module("programs.tool_draft")
    draft = program.adding_tool(problem.prompt)
    assert first_error(problem, draft) == num_right
    result = run("tool_draft", "--problem", str(k))
    assert first_error(problem, result.text) is None
    assert check_answer(problem, result.text)
    assert f"Answer: {problem.answer}\n{result.from_tool} tokens" in run.printed
    assert "This is wrong" not in run.printed
    assert result.text.startswith("".join(split_segments(draft)[:num_right]))
    assert result.from_tool > 15 and result.target_passes < 25


def test_programs_name_a_server_that_is_not_there(run):
    with pytest.raises(SystemExit, match=r"http://127\.0\.0\.1:9 does not answer"):
        importlib.import_module("programs.grade").main(["--url", "http://127.0.0.1:9"])


def test_readme_has_a_line_for_every_program():
    readme = (ROOT / "programs" / "README.md").read_text()
    names = {p.name for p in (ROOT / "programs").glob("*.py")}
    programs = sorted(names - {"__init__.py", "common.py", "server_template.py"})
    assert len(programs) == 5
    assert all(f"| [{name}]({name}) | " in readme for name in programs)


def test_cells_of_the_notebook_run(parse):
    """Red if a cell of programs/first_steps.ipynb fails, or no longer shows what the
    text above it says."""
    cells = json.loads((ROOT / "programs" / "first_steps.ipynb").read_text())["cells"]
    seen = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), seen)
            seen["URL"] = parse.url
    passes, scores = seen["passes"], seen["scores"]
    assert passes["semantic"] < passes["exact"] < passes["off"]
    assert scores[0] > 0.5 > scores[1] and len(scores) == len(seen["lines"])
