"""Every example in README.md and docs/ runs, as a reader would run it.

The Python blocks of a page become one script, in order, each line at its place: line 37 of a
traceback is line 37 of the page. It runs in an empty folder, in a process of its own, where a
warning is an error. Some things can be said about a block:

- `<!-- no-run: reason -->` in the line above it: it is compiled, not run.
- `<!-- file: name.py -->` in the line above it: it is a file of its own. The files of a page are
  written into one folder, where pytest runs their tests.
- `redis://localhost:6379` in it: a private Redis stands in.
- `mysql://shop:secret@localhost/shop` in it: a private MariaDB stands in.
- `postgresql://shop:secret@localhost/shop` in it: a private PostgreSQL stands in.
- `amqp://guest:guest@localhost/` in it: a private RabbitMQ stands in.
- `localhost:9092` in it: a private Kafka cluster stands in.
- `nats://localhost:4222` in it: a private NATS with JetStream stands in.
- `import boto3` in it: a private SQS stands in for AWS.
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
    r"^(?:<!-- (?:no-run: (?P<reason>.+)|file: (?P<file>\S+)) -->\n+)?"
    r"(?P<indent> *)```python\b.*\n(?P<code>(?:.*\n)*?) *```$",
    re.MULTILINE,
)
LOCAL_REDIS = re.compile(r"redis://localhost:6379\b")
LOCAL_MYSQL = "mysql://shop:secret@localhost/shop"
LOCAL_POSTGRES = "postgresql://shop:secret@localhost/shop"
LOCAL_RABBITMQ = "amqp://guest:guest@localhost/"
LOCAL_KAFKA = "localhost:9092"
LOCAL_NATS = "nats://localhost:4222"
NOBODYS_AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
USES_AWS = re.compile(r"^import boto3$", re.MULTILINE)
OF_PYTEST = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")


class Block(NamedTuple):
    """A Python block of a page."""

    line: int
    """Where its first line of code stands on the page."""
    code: str
    runs: bool
    file: str | None = None


def blocks(text: str) -> list[Block]:
    return [
        Block(
            line=text.count("\n", 0, found.start("code")) + 1,
            code=re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            runs=found["reason"] is None and found["file"] is None,
            file=found["file"],
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
    if LOCAL_RABBITMQ in source:
        source = source.replace(LOCAL_RABBITMQ, request.getfixturevalue("virtual_host").url)
    if LOCAL_KAFKA in source:
        source = source.replace(LOCAL_KAFKA, request.getfixturevalue("kafka_address"))
    if LOCAL_NATS in source:
        source = source.replace(LOCAL_NATS, request.getfixturevalue("nats_url"))
    example = tmp_path / f"page_{page.stem}.py"  # a plain name could hide a package
    example.write_text(source, encoding="utf-8")
    settings = {key: value for key, value in os.environ.items() if not key.startswith("SEMEL_")}
    if USES_AWS.search(source):
        settings |= NOBODYS_AWS | {"AWS_ENDPOINT_URL": request.getfixturevalue("sqs_url")}
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


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by their names."""
    found = blocks(page.read_text(encoding="utf-8"))
    return {block.file: block.code for block in found if block.file is not None}


@pytest.mark.parametrize("page", [page for page in PAGES if files(page)], ids=name)
def test_the_tests_that_a_page_shows_pass(page, tmp_path):
    shown = files(page)
    plugins = 'pytest_plugins = ["semel.testing.pytest_plugin"]\n'
    shown["conftest.py"] = shown.get("conftest.py", "") + plugins
    for file, code in shown.items():
        (tmp_path / file).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-q", *OF_PYTEST, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    written = sum(code.count("def test_") for code in shown.values())
    assert f"{written} passed" in done.stdout, f"{name(page)}:\n{done.stdout}{done.stderr}"


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

<!-- file: test_it.py -->
```python
third = 3
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
        Block(21, "third = 3\n", runs=False, file="test_it.py"),
    ]
    assert script(found).splitlines()[3] == "first = 1"
    assert script(found).splitlines()[14:] == ["if first:", "    second = 2"]
