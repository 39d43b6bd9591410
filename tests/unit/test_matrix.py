"""The page of what tests run and what a card saw is written, not typed."""

from docs import matrix


def test_page_is_what_the_tests_and_the_records_say():
    """Red if a family, a feature or a run on a card is not on docs/matrix.md."""
    fresh = matrix.page(matrix.families(), *matrix.records())
    assert matrix.PAGE.read_text() == fresh, "run python -m docs.matrix --write"


def test_only_records_of_a_card_are_seen():
    """Red if a cell that failed, or one of a CPU, counts as seen on a card."""
    gpu = '"source": {"device": {"gpu": "NVIDIA X"}}'
    lines = [
        '{"stage": "serve", "cell": "p/a/n1", "arm": "a", "args": '
        f'["--attention-backend", "fa3"], {gpu}}}',
        f'{{"stage": "proof", "cell": "q/triton/proof/steps", "state": "on", {gpu}}}',
        f'{{"stage": "serve", "cell": "p/b/n1", "arm": "b", "error": "x", {gpu}}}',
        '{"stage": "serve", "cell": "p/c/n1", "arm": "c", "source": {"device": {}}}',
    ]
    seen = matrix.seen_cells(lines)
    assert seen == {"p": {"X, fa3: a"}, "q": {"X, triton: steps"}}
    assert matrix.by_backend({"X, fa3: a", "X, fa3: b"}) == "X, fa3: a, b"


def test_only_tests_that_passed_are_seen(tmp_path):
    """Red if a test that failed or was skipped counts as seen on a card."""
    case = '<testcase classname="tests.gpu.test_x" name="{}">{}</testcase>'
    cases = case.format("a[1]", "") + case.format("b", "<skipped/>")
    (tmp_path / "tests.xml").write_text(f"<testsuites>{cases}</testsuites>")
    assert matrix.seen_tests(tmp_path / "tests.xml") == {"tests/gpu/test_x.py::a[1]"}


def test_pairs_of_features_are_those_of_the_marks():
    """Red if a refusal is shown as served, or a feature of three is left out."""
    served, refused = matrix.pairs_of("combines"), matrix.pairs_of("refuses")
    assert served[frozenset(("tensor parallelism", "head"))] >= 2
    assert served[frozenset(("draft in text", "tensor parallelism"))] == 1
    assert refused[frozenset(("images", "head"))] == 1 and refused[frozenset(["LoRA"])]
    assert not set(served) & set(refused)
    text = "\n".join(matrix.together())
    assert "| **LoRA** |" + " refused |" * len(matrix.FEATURES) in text


def test_modes_of_a_test_are_those_of_its_requests():
    """Red if a mode that no request has is shown, or the default is forgotten."""
    assert matrix.modes_in('{"parse_mode": "exact"}') == "exact"
    assert matrix.modes_in('"off", {"parse_threshold": 1.5}') == "semantic, off"
    assert matrix.modes_in("server.generate(prompt)") == "semantic"
