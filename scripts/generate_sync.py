"""Write the code for threads from the code for tasks.

The async files are written by hand; what threads do is the same text without `async` and `await`.
`make generate` writes the sync files again, and `make check` fails if that would change one byte
(`--check`). The tables below are the whole difference between the two kinds: whatever exists in one
of them only is named here.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Container, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "semel"

GENERATED = {
    f"engine/{name}.py": f"engine/_sync/{name}.py"
    for name in (
        "facade",
        "marks",
        "once",
        "once_per",
        "renewing",
        "runs",
        "starts",
        "transactions",
    )
} | {
    "adapters/consuming.py": "adapters/_sync/consuming.py",
    "adapters/integration.py": "adapters/_sync/integration.py",
    "aio.py": "sync.py",
    "repair/audit.py": "repair/_sync/audit.py",
    "repair/maintenance.py": "repair/_sync/maintenance.py",
    "repair/reconcile.py": "repair/_sync/reconcile.py",
    "repair/resolve.py": "repair/_sync/resolve.py",
    "stores/base.py": "stores/_sync/base.py",
    "stores/redis/aio.py": "stores/redis/store.py",
    "stores/remote/aio.py": "stores/remote/store.py",
    "stores/sql/aio.py": "stores/sql/store.py",
    "stores/sql/mysql/aio.py": "stores/sql/mysql/store.py",
    "stores/sql/postgres/aio.py": "stores/sql/postgres/store.py",
    "stores/tiered/aio.py": "stores/tiered/store.py",
    "transactions/links.py": "transactions/_sync/links.py",
}
"""The files that are written by hand, and those that are generated from them."""

SHARED = {
    "semel.adapters.integration": {
        "AsyncEngines",
        "AsyncHere",
        "BEGIN_AT_ONCE",
        "BEGIN_EVERY",
        "Background",
        "Engines",
        "Flow",
        "Here",
        "LARGE_AT_ONCE",
        "STUCK",
        "T",
        "Turns",
        "UNSENT",
        "_LAST_REQUESTS",
        "aio_awaited",
        "awaited",
    },
    "semel.repair.audit": {
        "AuditEntry",
        "KEY_PREFIX",
        "PAGE",
        "by_time",
        "logger",
        "read_entry",
    },
    "semel.repair.maintenance": {
        "Health",
        "check_target",
        "ended_before",
        "reject_empty_stores",
        "reject_memory",
        "store_of",
    },
    "semel.repair.reconcile": {
        "Background",
        "Case",
        "OpenCases",
        "Raised",
        "Report",
        "Unanswered",
        "caught",
        "checked_resolvers",
        "consult",
    },
    "semel.stores.batching": {
        "ALONE",
        "Alone",
        "MOST_BYTES",
        "weight_of_claim",
        "weight_of_complete",
    },
    "semel.transactions.links": {
        "command",
        "driver_connection",
        "is_core",
        "no_transaction",
        "question",
    },
}
"""Names that both kinds use, or that only one does: the generated file imports what it needs."""

RENAMED = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "StopAsyncIteration": "StopIteration",
    "aclosing": "closing",
    "adopt_async": "adopt",
    "aio": "sync",
    "async_execute": "execute",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "forget_async": "forget",
    "forget_finished_async": "forget_finished",
    "health_async": "health",
    "open_async_store": "open_store",
    "open_async_target": "open_target",
    "purge_async": "purge",
    "settle_async": "settle",
    "task": "thread",
    "tasks": "threads",
}
"""Words that are others for threads. Beside these, AsyncX becomes X, and aio_x becomes x."""

TEXTS = {
    "It belongs to the first event loop that uses it.": "Any number of threads may use it.",
    "on asyncio": "on a thread",
    "for asyncio": "for threads",
    "Async functions": "Functions",
    "in a task": "on a thread",
    "done again in the background": "done again",
    "redis.asyncio": "redis",
    "A connection of aiosqlite": "A connection of sqlite3",
    "a coroutine function that opens an asyncmy connection": (
        "a function that opens a PyMySQL connection"
    ),
    "on asyncmy": "on PyMySQL",
    "    Resolvers may be async; plain functions run in threads.\n": "",
    " Any awaitable may be returned, as a future.": "",
}
"""Phrases of docstrings that are others for threads."""

PROMISES = {"Awaitable", "Coroutine"}
"""Types that wrap what an async call returns; it is the last of what their brackets hold."""

KIND = {"asynchronous", "_asynchronous"}
"""Names whose True or False says which kind it is."""

ONLY_TASKS = {
    "mark_coroutine_function",
    "raise_if_cancelled",
    "cancellations",
    "LoopGuard",
    "only_loop",
    "has_ended",
}
"""Calls whose whole statement only tasks need: a thread is not cancelled and has no event loop."""

OMITTED = {
    "adapters/consuming.py": {"AsyncRunning"},
    "adapters/integration.py": {"never_began"},
    "repair/reconcile.py": {"AsyncBackground", "_ends_the_task", "aio_caught", "aio_consult"},
    "stores/sql/aio.py": {"_loop"},
    "transactions/links.py": {"aio_driver_connection"},
}
"""Classes, functions, methods and attributes that only tasks have, by file."""

LOOP = "loop_guard"
"""The attribute that holds an engine's event loop: its checks and its use as an argument."""

WHOLE = {"stores/base.py"}
"""Files that give both kinds: they import what is generated, and are imported by threads too."""

LEFT_OUT = {"__all__", "Creating", "Migrating"}
"""What such a file has besides, for both kinds or for threads alone: it is not generated."""

MODULES = {
    "semel." + by_hand.removesuffix(".py").replace("/", "."): (
        "semel." + generated.removesuffix(".py").replace("/", ".")
    )
    for by_hand, generated in GENERATED.items()
    if by_hand not in WHOLE
} | {
    "asyncio": "time",
    "redis.asyncio": "redis",
    "semel.stores.batching": "semel.stores.thread_batching",
}
"""Where the generated modules, and what exists for both kinds, are imported from."""

UNWRAPPED = {("engine/runs.py", "finished")}
"""Functions that only tasks need around an argument, by file."""


PROSE = {
    tokenize.STRING,
    tokenize.COMMENT,
    # What stands between the brackets of an f-string, which is one string before Python 3.12.
    getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
}
"""Tokens that hold words for people."""


class Edit(NamedTuple):
    """What to write instead of a part of the text."""

    start: int
    end: int
    text: str = ""


class Source:
    """The text of one async file, and where its lines begin."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the position in the whole text."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return where a part of the tree begins and ends."""
        end = node.end_lineno or 0, node.end_col_offset or 0  # a parsed tree has them
        return self.at(node.lineno, node.col_offset), self.at(*end)

    def lines(self, node: ast.stmt) -> tuple[int, int]:
        """Return the span of a statement's whole lines, its decorators included."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        return self.at(first, 0), self.at((node.end_lineno or 0) + 1, 0)


def renamed(word: str) -> str:
    """Return the word for threads."""
    plain = RENAMED.get(word, word)
    return re.sub(r"^(_*)(?:Async(?=[A-Z])|aio_)", r"\1", plain)


def renamed_text(text: str) -> str:
    """Return a docstring or a comment as it reads for threads."""
    for phrase, other in TEXTS.items():
        text = text.replace(phrase, other)
    text = re.sub(r"\b(?:async|await) ", "", text)
    return re.sub(r"\w+", lambda found: renamed(found[0]), text)


def edits_of_words(source: Source) -> Iterator[Edit]:
    """Rename words, and drop `async` and `await`."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        start, end = source.at(*token.start), source.at(*token.end)
        if token.type == tokenize.NAME and token.string in {"async", "await"}:
            yield Edit(start, end + 1)
        elif token.type == tokenize.NAME:
            yield Edit(start, end, renamed(token.string))
        elif token.type in PROSE:
            yield Edit(start, end, renamed_text(source.text[start:end]))


def called(node: ast.AST) -> str | None:
    """Return the plain name of what is called here."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
    return None


def is_only_for_tasks(node: ast.stmt, omitted: Container[str]) -> bool:
    """Tell whether a statement has no meaning for threads."""
    match node:
        case (
            ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)
        ) if name in omitted:
            return True
        case ast.If(test=part) | ast.Assign(targets=[part]) | ast.AnnAssign(target=part):
            attributes = (each.attr for each in ast.walk(part) if isinstance(each, ast.Attribute))
            if any(name in omitted for name in attributes):
                return True
    match node:
        case ast.Expr(value=value) | ast.Assign(value=value):
            match value:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name))):
                    return name == LOOP and isinstance(node, ast.Expr)
            return called(value) in ONLY_TASKS
    return False


def is_left_out(source: Source, node: ast.stmt) -> bool:
    """Tell whether a file that gives both kinds has this beside what is generated from it."""
    if source.name not in WHOLE:
        return False
    match node:
        case ast.ImportFrom(module=str(module)):
            return module == "semel." + GENERATED[source.name].removesuffix(".py").replace("/", ".")
        case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name in LEFT_OUT
    return False


def edits_of_tree(source: Source) -> Iterator[Edit]:
    """Drop what only tasks need, and what wraps the value of an async call."""
    omitted = OMITTED.get(source.name, ())
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.stmt) and (
            is_only_for_tasks(node, omitted) or is_left_out(source, node)
        ):
            yield Edit(*source.lines(node))
            continue
        match node:
            case ast.ImportFrom(module=str(name)) if name in MODULES:
                start = source.span(node)[0] + len("from ")
                yield Edit(start, start + len(name), MODULES[name])
            case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in PROMISES:
                last = inner.elts[-1] if isinstance(inner, ast.Tuple) else inner
                yield from around(source, node, last)
            case ast.Call(func=ast.Name(id=name), args=[inner]) if (source.name, name) in UNWRAPPED:
                yield from around(source, node, inner)
            case ast.Call(args=[*_, before, ast.Attribute(attr=name) as loop]) if name == LOOP:
                yield Edit(source.span(before)[1], source.span(loop)[1])
            case ast.Await():
                yield from edits_of_brackets(source, node)
            case ast.keyword(arg=name, value=ast.Constant(value=True) as value) if name in KIND:
                yield Edit(*source.span(value), "False")
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Constant(value=True) as value
            ) if name in KIND:
                yield Edit(*source.span(value), "False")


def imports_of(module: str, names: set[str]) -> str:
    """Import from a generated module, but from the async one what both kinds share."""
    shared = names & SHARED[module]
    own = {renamed(name) for name in names - shared}
    parts = {module: shared, MODULES[module]: own}
    return "\n".join(
        f"from {name} import {', '.join(sorted(some))}" for name, some in parts.items() if some
    )


def is_shared(node: ast.stmt, shared: Container[str]) -> bool:
    """Tell whether a statement of a module defines what both kinds share."""
    match node:
        case (
            ast.ClassDef(name=name)
            | ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.Assign(targets=[ast.Name(id=name)])
            | ast.AnnAssign(target=ast.Name(id=name))
        ):
            return name in shared
    return False


def is_text(node: ast.stmt) -> bool:
    """Tell whether a statement is a text, as below what it describes."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def edits_of_shared(source: Source) -> Iterator[Edit]:
    """Import what both kinds share, rather than writing it again."""
    module = "semel." + source.name.removesuffix(".py").replace("/", ".")
    shared = SHARED.get(module, set())
    tree = ast.parse(source.text)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module in SHARED:
            names = {each.name for each in node.names}
            yield Edit(*source.span(node), imports_of(node.module, names))
    for before, each in pairwise(tree.body):
        if is_shared(each, shared) or (is_text(each) and is_shared(before, shared)):
            # With the comments above it, but not with the import of what is shared.
            first = source.lines(each)[0] if before is imports[-1] else source.lines(before)[1]
            yield Edit(first, source.lines(each)[1])
    if shared:
        after = source.lines(imports[-1])[1]
        yield Edit(after, after, imports_of(module, shared) + "\n")


def around(source: Source, outer: ast.expr, inner: ast.expr) -> Iterator[Edit]:
    """Drop what is written around an expression."""
    yield Edit(source.span(outer)[0], source.span(inner)[0])
    yield Edit(source.span(inner)[1], source.span(outer)[1])


def edits_of_brackets(source: Source, node: ast.Await) -> Iterator[Edit]:
    """Drop the brackets of `(await x)[0]` and `(await x).y`, which only `await` needs."""
    start, end = source.span(node)
    text = source.text
    bracketed = text[start - 1] == "(" and text[end : end + 2] in {").", ")["}
    if bracketed and not re.search(r"[\w\])]$", text[: start - 1]):
        yield Edit(start - 1, start)
        yield Edit(end, end + 1)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Apply the edits; the longest counts where they overlap."""
    parts, position = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
        if edit.start < position:
            continue
        parts += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, text[position:]])


def generated(name: str) -> str:
    """Return the code for threads that belongs to an async file."""
    text = (PACKAGE / name).read_text(encoding="ascii")
    note = f"# Generated from {name} by `make generate`: change that file instead.\n"
    return note + for_threads(text, name)


def for_threads(text: str, name: str) -> str:
    """Return async code as it reads for threads, laid out as ruff does it."""
    source = Source(name, text)
    edits = [*edits_of_shared(source), *edits_of_tree(source), *edits_of_words(source)]
    text = edited(source.text, edits)
    target = str(PACKAGE / GENERATED[name])
    for command in (["check", "--fix-only"], ["format"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", target, "-"],
            input=text,
            capture_output=True,
            encoding="utf-8",
            check=True,
            cwd=ROOT,
        ).stdout
    return text


def main(arguments: list[str]) -> int:
    """Write the files, or tell which of them would change."""
    changed = []
    for name, target in GENERATED.items():
        path, text = PACKAGE / target, generated(name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            changed.append(target)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if "--check" in arguments and changed:
        print("not as `make generate` writes it:", *changed)
        return 1
    print("written:", *(changed or ["nothing, all is as generated"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
