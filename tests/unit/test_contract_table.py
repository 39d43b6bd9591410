"""The table that `make contract SGLANG=VERSION` ends with."""

import runpy
from pathlib import Path
from types import SimpleNamespace

SCRIPT = Path(__file__).parents[2] / "docs" / "contract_table.py"
TABLE = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
CASE = (
    '<testcase classname="tests.contract.test_{}" name="test_{}">'
    "<failure>{}</failure></testcase>"
)
MISSING = "No module named 'sglang.x'"
FAILURES = (
    ("plugin", "name[a-b]", f"E   ModuleNotFoundError: {MISSING}"),
    (
        "proof",
        "fault[1]",
        "E  AssertionError: ('...\\nImportError: No module named \\'sglang.x\\'\\n')",
    ),
    ("proof", "fault[2]", f"E  ModuleNotFoundError: {MISSING}"),
    (
        "source",
        "text[seam]",
        "E  AssertionError: ('file.py:f', 'if a:')\nE  assert 'if a:' in 'def f'",
    ),
)


def test_tests_that_fail_for_one_reason_are_one_row(tmp_path):
    """Red if a seam is lost, or if one reason has a row for each spelling."""
    file = tmp_path / "contract.xml"
    cases = "".join(CASE.format(*row) for row in FAILURES)
    file.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = TABLE.causes(file)
    assert list(map(len, found.values())) == [3, 1]
    assert TABLE.table(found).splitlines()[2:] == [
        f"| {MISSING} | `test_plugin::test_name[a-b]`, `test_proof::test_fault` (2) |",
        "| no `if a:` in SGLang's source | `test_source::test_text[seam]` |",
    ]
