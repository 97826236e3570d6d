"""The known bugs of other designs are 22; each has a test of ours, and its docstring says which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

KNOWN = range(1, 23)
FILES = sorted(Path(__file__).parent.glob("test_known_bugs_*.py"))


def numbers_in(path: Path) -> set[int]:
    tests = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]  # fmt: skip
    told = (re.match(r"Known bugs? ([\d, and]+):", ast.get_docstring(test) or "") for test in tests)
    return {int(number) for found in told if found for number in re.findall(r"\d+", found[1])}


def test_every_known_bug_has_a_test_of_its_own():
    assert set().union(*map(numbers_in, FILES)) == set(KNOWN)
