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
