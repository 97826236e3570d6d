"""Reads the public text and finds what our voice doesn't say: `make prose`.

Public text is README.md and the pages of docs/, and in src/ the docstrings of public names and each
string that a person may read: help, errors, log lines. Code, quotations, links, the changelog, and
decisions don't count: a decision is never rewritten. Two things are checked: a short list of
phrases, and the spelling of American English.

The list holds what a machine can find. Sentences and the glossary are for reading.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

ROOT = Path(__file__).resolve().parent.parent
PHRASES = {
    "say who: you, the caller, a person, no process": re.compile(
        r"\b(nobody|somebody|anybody|whoever)\b", re.IGNORECASE
    ),
    "a mistake raises an error": re.compile(r"\bis an? `?[A-Z]\w*Error\b"),
    "a server is unreachable or down": re.compile(r"\b(is|are|was|were) away\b"),
}
DOCSTRING = {"start with Return, Raise, Create, ...": re.compile(r"^(Gives?|Tells?)\b")}
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""A file and a text that stay as they are, with the reason."""
WORDS: dict[str, str] = {}
"""Words that codespell takes for others, with what they are."""

FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(
    r"<!--.*?-->"  # a remark
    r"|``.+?``|`[^`]+`"  # code
    r"|\]\([^)]*\)|https?://\S+"  # where a link leads
    r"|<[^<>\n]+>"  # a tag
    r'|"[^"\n]*"|\u201c[^\u201d]*\u201d',  # a quotation
    re.DOTALL,
)
ERROR = re.compile(r"`\w+Error`")
"""What stays, because a phrase of the list has it."""


class Found(NamedTuple):
    """A place in the public text that should read otherwise."""

    file: str
    line: int
    text: str
    advice: str

    def __str__(self) -> str:
        """Return the place and the advice, as compilers write them."""
        return f"{self.file}:{self.line}: {self.text!r}: {self.advice}"


def pages(root: Path) -> list[Path]:
    """Return the pages that a user reads."""
    decisions = root / "docs" / "project" / "decisions"
    found = (
        page for page in sorted((root / "docs").rglob("*.md")) if decisions not in page.parents
    )
    return [root / "README.md", *(page for page in found if page.name != "mission.md")]


def blank(found: re.Match[str]) -> str:
    """Return spaces in place of what is no prose, so that every line stays where it is."""
    if ERROR.fullmatch(found[0]):
        return found[0]
    return re.sub(r"[^\n]", " ", found[0])


def prose(text: str) -> str:
    """Return the prose of a page or a docstring, with spaces for everything else."""
    return NOT_PROSE.sub(blank, FENCE.sub(blank, text))


def strings(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """Return each string that a user may read, and whether it is a docstring."""

    def walk(node: ast.AST, *, public: bool) -> Iterator[tuple[ast.Constant, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                shown = not child.name.startswith("_") or child.name.startswith("__")
                yield from walk(child, public=public and shown)
            elif isinstance(child, ast.Expr) and _is_text(child.value):
                if public:
                    yield cast("ast.Constant", child.value), True
            elif _is_text(child):
                yield cast("ast.Constant", child), False
            else:
                yield from walk(child, public=public)

    yield from walk(tree, public=True)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def public_text(file: Path) -> tuple[list[str], list[int]]:
    """Return the lines of a file with nothing but its public text, and where docstrings begin."""
    source = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return prose(source).split("\n"), []
    lines = [""] * (source.count("\n") + 1)
    begin = []
    for constant, is_docstring in strings(ast.parse(source)):
        first = constant.lineno - 1
        if is_docstring:
            begin.append(first)
        for number, line in enumerate(prose(str(constant.value)).split("\n"), first):
            lines[min(number, len(lines) - 1)] += f" {line.strip()}"
    return [line.strip() for line in lines], begin


def phrases(name: str, lines: list[str], begin: list[int]) -> Iterator[Found]:
    """Find the phrases of the list."""
    for number, line in enumerate(lines):
        rules = PHRASES | (DOCSTRING if number in begin else {})
        for advice, pattern in rules.items():
            for found in pattern.finditer(line):
                if (name, found[0]) not in EXCEPTIONS:
                    yield Found(name, number + 1, found[0], advice)


def spelling(texts: dict[str, list[str]]) -> Iterator[str]:
    """Ask codespell about a copy that has nothing but the public text."""
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in texts.items():
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text("\n".join(lines), encoding="utf-8")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "codespell_lib", "--builtin=clear,rare,en-GB_to_en-US"),
                f"--ignore-words-list={','.join(WORDS)}",
                ".",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        yield from (line.removeprefix("./") for line in done.stdout.splitlines())
        if done.returncode and not done.stdout:
            yield done.stderr


def findings(root: Path = ROOT) -> list[str]:
    """Return everything that should read otherwise."""
    files = [*pages(root), *sorted((root / "src").rglob("*.py"))]
    found: list[str] = []
    texts = {}
    for file in files:
        name = file.relative_to(root).as_posix()
        texts[name], begin = public_text(file)
        found += map(str, phrases(name, texts[name], begin))
    return [*found, *spelling(texts)]


if __name__ == "__main__":
    wrong = findings()
    print(
        "\n".join(wrong) or "The public text has none of the phrases, and codespell finds nothing."
    )
    sys.exit(bool(wrong))
