"""Every example in README.md and docs/ runs, as a reader would run it.

The Python blocks of a page become one script, in order, each line at its place: line 37 of a
traceback is line 37 of the page. It runs in an empty folder, in a process of its own, where a
warning is an error. Two things can be said about a block:

- `<!-- no-run: reason -->` in the line above it: it is compiled, not run.
- `redis://localhost:6379` in it: a private Redis stands in.
- `mysql://shop:secret@localhost/shop` in it: a private MariaDB stands in.
- `postgresql://shop:secret@localhost/shop` in it: a private PostgreSQL stands in.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"^(?:<!-- no-run: (?P<reason>.+) -->\n+)?(?P<indent> *)```python\b.*\n(?P<code>(?:.*\n)*?) *```$",
    re.MULTILINE,
)
LOCAL_REDIS = re.compile(r"redis://localhost:6379\b")
LOCAL_MYSQL = "mysql://shop:secret@localhost/shop"
LOCAL_POSTGRES = "postgresql://shop:secret@localhost/shop"


class Block(NamedTuple):
    """A Python block of a page."""

    line: int
    """Where its first line of code stands on the page."""
    code: str
    runs: bool


def blocks(text: str) -> list[Block]:
    return [
        Block(
            line=text.count("\n", 0, found.start("code")) + 1,
            code=re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            runs=found["reason"] is None,
        )
        for found in BLOCK.finditer(text)
    ]


def script(found: list[Block]) -> str:
    """Put the blocks that run at their lines; everything else is empty."""
    lines: list[str] = []
    for block in found:
        if block.runs:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.splitlines()
    return "\n".join(lines) + "\n"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))], ids=name
)
def test_the_examples_of_the_page_work(page, tmp_path, request):
    found = blocks(page.read_text(encoding="utf-8"))
    for block in found:
        padded = "\n" * (block.line - 1) + block.code
        compile(padded, name(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    source = script(found)
    if LOCAL_REDIS.search(source):
        private = request.getfixturevalue("redis_url").removesuffix("/0")
        source = LOCAL_REDIS.sub(private, source)
    if LOCAL_MYSQL in source:
        source = source.replace(LOCAL_MYSQL, request.getfixturevalue("mysql_url"))
    if LOCAL_POSTGRES in source:
        source = source.replace(LOCAL_POSTGRES, request.getfixturevalue("postgres_url"))
    example = tmp_path / f"page_{page.stem}.py"  # a plain name could hide a package
    example.write_text(source, encoding="utf-8")
    settings = {key: value for key, value in os.environ.items() if not key.startswith("SEMEL_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", example],
        cwd=tmp_path,
        env=settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{name(page)}:\n{done.stdout}{done.stderr}"
    # What a destructor finds unclosed cannot raise; Python only tells of it.
    assert "Exception ignored" not in done.stderr, f"{name(page)}:\n{done.stderr}"


def test_a_block_keeps_its_line_and_can_be_kept_from_running():
    page = """# Page

```python
first = 1
```

<!-- no-run: it would fail -->
```python
raise SystemExit
```

1. In a list:

    ```python
    if first:
        second = 2
    ```

```text
not Python
```
"""
    found = blocks(page)
    assert found == [
        Block(4, "first = 1\n", runs=True),
        Block(9, "raise SystemExit\n", runs=False),
        Block(15, "if first:\n    second = 2\n", runs=True),
    ]
    assert script(found).splitlines()[3] == "first = 1"
    assert script(found).splitlines()[14:] == ["if first:", "    second = 2"]
