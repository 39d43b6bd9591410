"""Data sets in their published schemas, answer checkers, and the sandbox."""

import csv
import json
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow.parquet
import pytest

from benchmarks.harness import checkers, datasets
from benchmarks.harness.checkers import (
    check_choice,
    check_code,
    check_math,
    choice_letter,
    code_of,
    is_right,
    rate,
)
from benchmarks.harness.datasets import DATA_SETS, DataError, Item, load_items
from benchmarks.harness.sandbox import run_program

# Hand-written rows: field names as published, contents our own.
ROWS = {
    "gsm8k": {
        "question": "Ana has 2 bags of 1,500 beans. How many beans?",
        "answer": "2 * 1500 = <<2*1500=3000>>3000\n#### 3,000",
    },
    "math500": {
        "problem": "Write $0.5$ as a fraction.",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    "mmlu": {
        "question": "Which is a prime?",
        "subject": "elementary_mathematics",
        "choices": ["4", "6", "7", "8"],
        "answer": 2,
    },
    "mmlu-pro": {
        "question_id": 70,
        "question": "Which is the tenth letter?",
        "options": list("zyxwvutsrj"),
        "answer": "J",
        "answer_index": 9,
        "cot_content": "",
        "category": "other",
        "src": "ours",
    },
    "mmlu-redux": {
        "question": "Which is even?",
        "choices": ["1", "2", "3", "5"],
        "answer": 0,
        "error_type": "wrong_groundtruth",
        "source": "",
        "correct_answer": "1",
        "potential_reason": "",
    },
    "gpqa-diamond": {
        "Record ID": "rec1",
        "Question": "What is H2O?",
        "Correct Answer": "water",
        "Incorrect Answer 1": "salt",
        "Incorrect Answer 2": "air",
        "Incorrect Answer 3": "gold",
        "Subdomain": "Chemistry",
    },
    "humaneval-plus": {
        "task_id": "HumanEval/900",
        "prompt": 'import math\n\ndef root(n: int) -> int:\n    """Root."""\n',
        "canonical_solution": "    return math.isqrt(n)\n",
        "entry_point": "root",
        "test": "def check(candidate):\n    assert candidate(10) == 3\n",
    },
    "mbpp-plus": {
        "task_id": 900,
        "code": "def twice(x):\n    return 2 * x",
        "prompt": "Write a function to double a number.",
        "source_file": "",
        "test_imports": [],
        "test_list": ["assert twice(2) == 4"],
        "test": "import numpy as np\nfor x in [1, 5]:\n    assert twice(x) == 2 * x\n",
    },
    "mt-bench": {
        "question_id": 81,
        "category": "writing",
        "turns": ["Write a haiku.", "Now in capitals."],
        "reference": ["five seven five"],
    },
    "speed-bench": {
        "question_id": "q1",
        "category": "coding",
        "sub_category": "",
        "turns": ["Sort a list."],
        "source": "",
        "src_id": "",
        "difficulty": "",
        "multiturn": False,
    },
    "prompts": {"prompt": "What is 2+2?", "answer": 4},
}
RIGHT = {
    "gsm8k": "So there are \\boxed{3000} beans.",
    "math500": "Thus $\\boxed{0.5}$.",
    "mmlu": "7 is prime.\nAnswer: C",
    "mmlu-pro": "The answer is (J).",
    "mmlu-redux": "Answer: B",
    "humaneval-plus": "```python\n    return math.isqrt(n)\n```",
    "mbpp-plus": "Here:\n```python\ndef twice(x):\n    return x + x\n```\nUse it:\n"
    "```python\nprint(twice(2))\n```\nDone.",
    "prompts": "Answer: 4",
}
WRONG = {
    "gsm8k": "3001",
    "math500": "Thus $\\boxed{5}$.",
    "mmlu": "Answer: A",
    "mmlu-pro": "Answer: I",
    "mmlu-redux": "Answer: A",
    "humaneval-plus": "```python\ndef root(n):\n    return n\n```",
    "mbpp-plus": "```python\ndef twice(x):\n    return 4\n```",
    "prompts": "5",
}


def load_row(tmp_path, name, row=None):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(row or ROWS[name]) + "\n")
    (item,) = load_items(name, problems=0, seed=0, path=str(path))
    return item


@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_in_the_published_schema_become_items(tmp_path, name):
    item = load_row(tmp_path, name)
    assert item.turns and all(item.turns)
    question = ROWS[name].get("question") or ROWS[name].get("problem")
    assert not question or item.turns[0].startswith(question)


def test_every_data_set_has_rows_here_or_a_generator():
    assert set(ROWS) | {"embedded"} == set(DATA_SETS)


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_checkers_tell_right_from_wrong(tmp_path, name):
    item = load_row(tmp_path, name)
    checker = DATA_SETS[name].checker
    assert is_right(checker, item, RIGHT[name]) is True
    assert is_right(checker, item, WRONG[name]) is False
    assert is_right(checker, item, "") is False


def test_gpqa_hides_the_right_option_at_a_fixed_place(tmp_path):
    item = load_row(tmp_path, "gpqa-diamond")
    assert f"{item.reference}. water" in item.turns[0].splitlines()
    assert load_row(tmp_path, "gpqa-diamond") == item
    places = {
        DATA_SETS["gpqa-diamond"].read(ROWS["gpqa-diamond"], n).reference
        for n in range(40)
    }
    assert places == set("ABCD")


def test_open_answers_are_not_graded(tmp_path):
    for name in ("mt-bench", "speed-bench"):
        item = load_row(tmp_path, name)
        assert is_right(DATA_SETS[name].checker, item, "anything") is None
    assert load_row(tmp_path, "prompts", {"prompt": "Hi"}).reference is None


@pytest.mark.parametrize(
    ("error_type", "correct", "kept"),
    [
        ("ok", None, "A"),
        ("wrong_groundtruth", "C", "C"),
        ("wrong_groundtruth", "2 is even", None),
        ("bad_question_clarity", None, None),
        ("no_correct_answer", None, None),
    ],
)
def test_mmlu_redux_keeps_what_its_authors_found_sound(error_type, correct, kept):
    row = {**ROWS["mmlu-redux"], "error_type": error_type, "correct_answer": correct}
    item = DATA_SETS["mmlu-redux"].read(row, 0)
    assert (item.reference if item else None) == kept


def test_the_hub_form_of_mt_bench_is_read_as_well(tmp_path):
    row = {"prompt": ["a", "b"], "prompt_id": 7, "category": "x", "reference": []}
    item = load_row(tmp_path, "mt-bench", row)
    assert (item.id, item.turns) == ("mt-bench-7", ("a", "b"))


def test_items_with_one_id_stay_apart(tmp_path):
    """Red if a result takes another's place in paired figures."""
    path = tmp_path / "rows.jsonl"
    rows = [{"id": "a", "prompt": f"{k}+1?"} for k in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = load_items("prompts", problems=0, seed=0, path=str(path))
    assert len({item.id for item in found}) == len(found) == 3


def test_placeholders_of_speed_bench_are_refused(tmp_path):
    turn = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
    with pytest.raises(DataError, match="preparation script"):
        load_row(tmp_path, "speed-bench", {**ROWS["speed-bench"], "turns": [turn]})


def test_files_of_every_kind_give_the_same_items(tmp_path):
    row = ROWS["gpqa-diamond"]
    paths = [tmp_path / f"rows{end}" for end in (".jsonl", ".json", ".csv", ".parquet")]
    paths[0].write_text(json.dumps(row))
    paths[1].write_text(json.dumps([row]))
    with paths[2].open("w", newline="") as f:
        writer = csv.DictWriter(f, row)
        writer.writeheader()
        writer.writerow(row)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), paths[3])
    items = [load_items("gpqa-diamond", problems=0, seed=0, path=str(p)) for p in paths]
    assert all(found == items[0] for found in items)


def test_problems_are_drawn_by_seed(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Say {n}", "id": n} for n in range(50)]
    path.write_text("\n".join(map(json.dumps, rows)))

    def ids(seed):
        found = load_items("prompts", problems=10, seed=seed, path=str(path))
        return [item.id for item in found]

    assert len(set(ids(1))) == 10 and ids(1) == ids(1) != ids(2)
    assert len(load_items("prompts", problems=99, seed=1, path=str(path))) == 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt_": 1}', "row 0 is not in the schema of a prompt file"),
        ("not json", "cannot be read"),
        ("", "no usable row"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_items("prompts", problems=0, seed=0, path=str(path))
    with pytest.raises(DataError, match="ends in '.txt'; expected one of .jsonl"):
        load_items("prompts", problems=0, seed=0, path="rows.txt")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mmlu", {"question": "Q", "choices": "['a', 'b']", "answer": 0}, "'choices'"),
        ("mmlu", {"question": "Q", "choices": ["a"], "answer": "A"}, "invalid literal"),
        ("mmlu-pro", {"question": "Q", "options": "['a']", "answer": "A"}, "'options'"),
        (
            "mmlu-redux",
            {"question": "Q", "choices": "ab", "answer": 0, "error_type": "ok"},
            "'choices'",
        ),
        (
            "mbpp-plus",
            {"task_id": 1, "prompt": "P", "test_list": "['a']", "test": ""},
            "'test_list'",
        ),
        ("mt-bench", {"prompt": "['a', 'b']"}, "'prompt'"),
        ("speed-bench", {"turns": "['a', 'b']"}, "'turns'"),
        ("prompts", {"turns": "Say something."}, "'turns'"),
    ],
)
def test_fields_of_another_kind_are_named(tmp_path, name, row, message):
    """Red if a list that a CSV file made a string of is read letter by letter."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=f"{name}: row 0 is not .*{message}"):
        load_items(name, problems=0, seed=0, path=str(path))


def test_generated_problems_have_no_file():
    """Red if a file of one's own is left aside for the data set that is the default."""
    with pytest.raises(DataError, match="'mine.jsonl' was given, .* `prompts`"):
        load_items("embedded", problems=2, seed=0, path="mine.jsonl")


def test_offline_says_what_to_download_and_where_to_put_it(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    import datasets as library

    monkeypatch.setattr(library, "load_dataset", offline)
    with pytest.raises(DataError) as caught:
        datasets.fetch_rows(DATA_SETS["gpqa-diamond"])
    message = str(caught.value)
    assert "\n" not in message and "Couldn't reach the Hub" in message
    assert "download split 'train' of the data set Idavidrein/gpqa" in message
    assert "accept its terms" in message
    assert "{name: gpqa-diamond, path: ...}" in message


# -- Checkers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("So $\\boxed{x = 3}$", "3", True),
        ("The set is $\\boxed{\\{1, 2\\}}$", "\\{2, 1\\}", True),
        ("$\\boxed{\\dfrac{2}{4}}$", "\\frac{1}{2}", True),
        ("$\\boxed{(1, 3)}$", "(3, 1)", False),
    ],
)
def test_math_checker_compares_values_not_texts(text, gold, right):
    assert check_math(text, gold) is right


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("**Answer: (B)**", "B"),
        ("The answer is C. No: the answer is D.", "D"),
        ("\\boxed{A}", "A"),
        ("answer: $\\boxed{\\text{E}}$", "E"),
        ("So it must be (C).", "C"),
        ("A fine question without an end", None),
        ("The answer is a sum of two, so $\\boxed{C}$", "C"),
        ("**Answer:** C\n\nThis answer is a direct consequence.", "C"),
        ("The answer is a bit subtle.\n\n**Answer: $\\boxed{\\text{C}}$**", "C"),
        ("Answer: [D]", "D"),
        ("So the answer I choose is B.", "B"),
        ("The answer is I", "I"),
        ("answer is \\(B\\)", "B"),
    ],
)
def test_choice_letter(text, letter):
    assert choice_letter(text) == letter
    assert check_choice(text, "B") is (letter == "B")


def test_code_is_the_last_block_and_may_be_a_body_or_a_whole():
    assert code_of("a\n```py\nx = 1\n```\n```python\ny = 2\n```") == "y = 2\n"
    assert code_of("x = 1") == "x = 1"
    reference = {
        "head": 'import math\n\ndef f(x):\n    """Doc."""\n',
        "tests": "def check(g):\n    assert g(4) == 2\n\ncheck(f)\n",
    }
    assert check_code("```python\n    return math.isqrt(x)\n```", reference)
    assert check_code("```python\ndef f(x):\n    return math.isqrt(x)\n```", reference)
    assert not check_code("```python\ndef f(x):\n    return x\n```", reference)


GOOD_CODE = "def f(x):\n    return x + 1\n"
BAD_CODE = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"```Python\n{GOOD_CODE}```", True),
        (f"```python3\n{GOOD_CODE}```\nThen:\n```python\nprint(f(1))\n```", True),
        (f"```python\n{GOOD_CODE}```\nIt prints\n```text\n2\n```\n", True),
        (f"```python\n{GOOD_CODE}\nif __name__ == '__main__':\n    input()\n```", True),
        (f"```python\n{BAD_CODE}\nimport sys\nsys.exit(0)\n```", False),
        (
            f"```python\n{BAD_CODE}\nif __name__ == '__main__':\n"
            "    import unittest\n    unittest.main()\n```",
            False,
        ),
        (f"```python\n{BAD_CODE}\nimport os\nos._exit(0)\n```", False),
    ],
)
def test_code_passes_by_its_tests_alone(text, right):
    """Red if a program that leaves before the tests passes, or a right one fails for
    what stands around it."""
    reference = {"head": "", "tests": "assert f(1) == 2\n", "entry_point": "f"}
    assert check_code(text, reference) is right


def test_math_that_never_ends_is_wrong_in_time(monkeypatch):
    """Red if one answer keeps a run from its report for ever."""
    monkeypatch.setattr(checkers, "MATH_TIMEOUT_S", 1)
    assert not check_math("$\\boxed{10^{10^{10}}}$", "3")


def test_rating_asks_the_judge_with_the_whole_conversation():
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers.get("Authorization"), body))
            message = {"content": "Fine, not [[3]], rather [[8.5]]"}
            data = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        judge = {"url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "k"}
        item = Item("x", ("First?", "Second?"), ["gold one"])
        assert rate(item, ["one", "two"], judge) == 8.5
    finally:
        server.shutdown()
        server.server_close()
    path, key, body = seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    content = json.loads(body)["messages"][0]["content"]
    order = ["First?", "gold one", "one", "Second?", "two"]
    places = [content.index(part) for part in ("First?", "gold one", "Second?")]
    assert places == sorted(places) and all(part in content for part in order)


# -- Sandbox -------------------------------------------------------------------


def test_program_that_ends_well_passes():
    assert run_program("import json, math\nassert math.pi > 3\n").passed
    assert run_program("import sys\nassert sys.stdin.read() == ''\n").passed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("raise SystemExit(3)", "no message"),
        ("x = bytearray(6 << 30)", "MemoryError"),
        ("while True: pass", "SIGKILL"),
        ("open('big', 'wb').write(b'x' * (32 << 20))", "File too large"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("syntax error", "SyntaxError"),
    ],
)
def test_wrong_programs_fail_with_a_reason(source, reason):
    verdict = run_program(source, cpu_s=2)
    assert not verdict.passed and reason in verdict.reason


def test_program_that_sleeps_is_stopped():
    verdict = run_program("import time; time.sleep(60)", wall_s=1)
    assert verdict.reason == "ran longer than 1 s"


def test_program_sees_neither_our_environment_nor_our_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY_OF_OURS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mark").touch()
    source = (
        "import os\n"
        "assert 'SECRET_KEY_OF_OURS' not in os.environ\n"
        "assert os.listdir('.') == []\n"
    )
    assert run_program(source).passed


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_program_has_the_packages_of_this_interpreter(tmp_path, monkeypatch, name):
    """Red if tests that need numpy fail where Debian keeps it in dist-packages."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "only_here.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(folder))
    assert run_program("import only_here\nassert only_here.VALUE").passed


def kernel_gives_network_namespaces() -> bool:
    """Whether a plain child process may make one, tried by util-linux."""
    command = ["unshare", "--user", "--net", "true"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_program_cannot_reach_our_ports_where_the_kernel_allows_that():
    """Red if the sandbox shares our network where it need not."""
    if not kernel_gives_network_namespaces():
        pytest.skip("this kernel gives no network namespace to this user")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        verdict = run_program(source)
    assert not verdict.passed and "Error" in verdict.reason
