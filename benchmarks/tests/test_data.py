"""Data sets in their published schemas, answer checkers, and the sandbox."""

import json

import pytest

from benchmarks.harness.checkers import (
    check_choice,
    check_code,
    check_math,
    choice_letter,
    code_of,
    is_right,
)
from benchmarks.harness.datasets import DATA_SETS, load_items
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
    "nemo-skills": {
        "id": "aime25-0",
        "problem": "Find the sum of all integer bases $b>9$.",
        "expected_answer": "70",
        "reference_solution": "...",
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
    "nemo-skills": "49 + 21 = \\boxed{70}",
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
    "nemo-skills": "\\boxed{71}",
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


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_checkers_tell_right_from_wrong(tmp_path, name):
    item = load_row(tmp_path, name)
    checker = DATA_SETS[name].checker
    assert is_right(checker, item, RIGHT[name]) is True
    assert is_right(checker, item, WRONG[name]) is False
    assert is_right(checker, item, "") is False


def test_open_answers_are_not_graded(tmp_path):
    for name in ("mt-bench", "speed-bench"):
        item = load_row(tmp_path, name)
        assert is_right(DATA_SETS[name].checker, item, "anything") is None
    assert load_row(tmp_path, "prompts", {"prompt": "Hi"}).reference is None


def test_items_with_one_id_stay_apart(tmp_path):
    """Red if a result takes another's place in paired figures."""
    path = tmp_path / "rows.jsonl"
    rows = [{"id": "a", "prompt": f"{k}+1?"} for k in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = load_items("prompts", problems=0, seed=0, path=str(path))
    assert len({item.id for item in found}) == len(found) == 3


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
