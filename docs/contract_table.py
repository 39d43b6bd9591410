"""What `make contract SGLANG=VERSION` found, as a table by cause.

    python docs/contract_table.py build/contract-0.5.22.xml

Tests that fail for one reason stand in one row. The reason is the last import or
attribute that a failure names, else the first line of its message.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

MISSING = re.compile(r"(?:ModuleNotFound|Import|Attribute)Error: (.+)")
# Source text that a test looks for.
SOURCE = re.compile(r"(?:AssertionError: \(.+?, |assert )'(.+?)'(?:\)| in )")


def reason(text: str) -> str:
    """The cause of a failure, of its whole text."""
    plain = text.replace("\\n", "\n").replace("\\'", "'")
    if found := SOURCE.search(text):
        return f"no `{found[1]}` in SGLang's source"
    if missing := MISSING.findall(plain):
        return re.sub(r" \(\S+\)$", "", missing[-1].strip())
    lines = [line[1:].strip() for line in plain.splitlines() if line.startswith("E ")]
    return lines[0] if lines else plain.strip().splitlines()[-1]


def causes(file: Path) -> Mapping[str, list[str]]:
    """Reason to the tests that fail for it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(file).iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            # A file that cannot be imported has no tests.
            folder = (case.get("classname") or "").rpartition(".")[2]
            name = "::".join(filter(None, (folder, case.get("name"))))
            why = reason(fault.text or fault.get("message") or "")
            found[why].append(name.replace("tests.contract.", ""))
    return found


def table(found: Mapping[str, Sequence[str]]) -> str:
    lines = ["| What differs | Tests that fail |", "|---|---|"]
    for why, tests in sorted(found.items(), key=lambda row: -len(row[1])):
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for test in tests:
            groups[test.split("[")[0]].append(test)
        shown = (
            f"`{one[0]}`" if len(one) == 1 else f"`{name}` ({len(one)})"
            for name, one in groups.items()
        )
        lines.append(f"| {why} | {', '.join(shown)} |")
    return "\n".join(lines)


def main(args: Sequence[str]) -> int:
    for name in args:
        found = causes(Path(name))
        sys.stdout.write(f"{table(found)}\n" if found else "Nothing differs.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
