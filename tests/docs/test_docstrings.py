"""Docstrings of public names: each parameter is explained, and the examples run."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import enum
import importlib
import inspect
import io
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiosqlite
import fastapi
import pytest
from msgspec import Struct

import semel
from semel import AsyncIdempotency, Idempotency, Policy, default
from semel.stores import base

PROJECT = Path(__file__).parents[2]

SHOWN = re.compile(r"^::: (semel\.[\w.]+)$", re.MULTILINE)
NAMED = re.compile(r"`([\w.]+)`")

OPTIONS = {"semel.http.options.Choices", "semel.adapters.grpc.rules.Choices"}
"""Options of the web integrations: their pages explain each one in a table."""

MADE_BY_US = {
    "semel.adapters.aio_pika.AioPikaConsumer",
    "semel.adapters.pika.PikaConsumer",
    "semel.sync.Once",
    "semel.sync.OncePer",
}
"""Nobody else calls their constructors."""

ALIKE = {"semel.sync.Marks"}
"""Classes whose methods take the same few arguments, which the class explains."""

VERBS = {name: verb for name, verb in vars(base.Store).items() if inspect.isfunction(verb)}
"""Verbs of stores, which are explained once, wherever else they are offered."""


class Documented(NamedTuple):
    """A callable, and what is written about its parameters."""

    function: Any
    text: str


def found(name: str) -> Any:
    """Return what a page of the reference shows under this name."""
    module, parts = semel, name.split(".")[1:]
    for at, part in enumerate(parts):
        if not hasattr(module, part) or inspect.ismodule(getattr(module, part)):
            path = ".".join(["semel", *parts[: at + 1]])
            with contextlib.suppress(ModuleNotFoundError):
                module = importlib.import_module(path)
                continue
        module = getattr(module, part)
    return module


def public_names() -> list[str]:
    pages = sorted((PROJECT / "docs" / "reference").glob("*.md"))
    shown = [name for page in pages for name in SHOWN.findall(page.read_text(encoding="utf-8"))]
    return sorted({*shown, *(f"semel.{name}" for name in semel.__all__)})


def functions() -> Iterator[tuple[str, Documented]]:
    """Every function and class that a user may call, and the public methods of the classes."""
    for name in public_names():
        thing = found(name)
        if not inspect.isclass(thing):
            if inspect.isroutine(thing):
                yield name, Documented(thing, thing.__doc__ or "")
            continue
        own = thing.__doc__ or ""
        # The fields of a value have docstrings of their own.
        kinds = Struct | enum.Enum | tuple | Policy
        value = issubclass(thing, kinds) or name in OPTIONS | MADE_BY_US
        if not value:
            yield name, Documented(thing, f"{own} {thing.__init__.__doc__}")
        if thing.__name__ == "StoreContract":
            continue  # its methods are tests
        for part, method in inspect.getmembers(thing, inspect.isroutine):
            ours = getattr(method, "__module__", None) or ""
            if not part.startswith("_") and ours.startswith("semel"):
                text = f"{method.__doc__} {own if name in ALIKE else ''}"
                if part in VERBS:
                    text += f"{VERBS[part].__doc__} {base.Store.__doc__}"
                yield f"{name}.{part}", Documented(method, text)


def is_dictated(name: str, function: Any) -> bool:
    """Whether a framework says how this method looks."""
    owner = found(name.rpartition(".")[0])
    return inspect.isclass(owner) and any(
        function.__name__ in vars(kind)
        for kind in owner.__mro__
        if not kind.__module__.startswith("semel")
    )


FUNCTIONS = {
    name: documented
    for name, documented in functions()
    if inspect.isclass(documented.function) or not is_dictated(name, documented.function)
}


def parameters(function: Any) -> list[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # an exception that takes what every exception takes
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in named and parameter.name not in {"self", "cls", "_"}
    ]


def explained(documented: Documented) -> str:
    """The docstring, with that of the function that it refers to: "`settle`, awaited."."""
    text = documented.text
    for name in NAMED.findall(text.partition("\n")[0]):
        beside = vars(sys.modules[documented.function.__module__])
        if name in beside:
            text += str(beside[name].__doc__)
            continue
        with contextlib.suppress(AttributeError):
            text += str(found(f"semel.{name}").__doc__)
    return text


def test_the_public_names_are_found():
    assert {"semel.Idempotency.execute", "semel.open_store", "semel.repair.purge"} <= set(FUNCTIONS)
    assert len(FUNCTIONS) > 150


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_explains_every_parameter(name):
    documented = FUNCTIONS[name]
    text = explained(documented)
    missing = [one for one in parameters(documented.function) if not mentions(text, one)]
    assert not missing, f"the docstring of {name} says nothing of {', '.join(missing)}"


def mentions(text: str, parameter: str) -> bool:
    return re.search(rf"\b{parameter}\b", text) is not None


# --- examples ------------------------------------------------------------------------------------

ENGINES = ("semel.Idempotency", "semel.AsyncIdempotency")
METHODS = (
    "execute",
    "run",
    "consume",
    "once",
    "once_per",
    "attempt",
    "transaction",
    "marks",
    "peek",
)
MAIN = [
    *ENGINES,
    *(f"{engine}.{method}" for engine in ENGINES for method in METHODS),
    "semel.Attempt",
    "semel.EncryptedCodec",
    "semel.KeyGenerator",
    "semel.Policy",
    "semel.Policy.payment",
    "semel.adapters.asgi.IdempotencyMiddleware",
    "semel.adapters.fastapi.Idempotent",
    "semel.adapters.flask.Idempotent",
    "semel.adapters.httpx.IdempotentTransport",
    "semel.adapters.requests.IdempotentAdapter",
    "semel.adapters.starlette.Idempotent",
    "semel.adapters.wsgi.IdempotencyMiddleware",
    "semel.attempt",
    "semel.configure",
    "semel.consume",
    "semel.current_attempt",
    "semel.derive_key",
    "semel.execute",
    "semel.guards.StateGuard",
    "semel.guards.VersionGuard",
    "semel.guards.transition",
    "semel.guards.update_if_version",
    "semel.http.parse_key",
    "semel.http.problem_response",
    "semel.new_key",
    "semel.require_attempt",
    "semel.once",
    "semel.once_per",
    "semel.open_async_store",
    "semel.open_store",
    "semel.register_type",
    "semel.repair.Reconciler",
    "semel.repair.purge",
    "semel.repair.settle",
    "semel.run",
    "semel.sync.Marks",
    "semel.testing.FakeClock",
    "semel.testing.FaultyStore",
    "semel.testing.in_memory",
]
"""What a new user looks up first."""


def with_examples() -> dict[str, Any]:
    things = {name: documented.function for name, documented in FUNCTIONS.items()}
    things |= {name: found(name) for name in (*public_names(), *MAIN)}
    return {
        name: thing
        for name, thing in sorted(things.items())
        if ">>> " in (thing.__doc__ or "") and thing is not semel.UNSET
    }


@pytest.mark.parametrize("name", MAIN)
def test_a_name_that_a_new_user_looks_up_has_an_example(name):
    assert name in with_examples()


@pytest.mark.parametrize("name", with_examples())
def test_the_reference_shows_an_example_as_code(name):
    before = inspect.getdoc(with_examples()[name]).partition(">>> ")[0]
    assert before.rstrip().endswith("\nExamples:"), "elsewhere, >>> makes a quotation"


@pytest.fixture
def surroundings(tmp_path, monkeypatch) -> Iterator[dict[str, Any]]:
    """What the examples take for granted, but for what they import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default._default, "_engine", None)
    file = tmp_path / "shop.db"
    with (
        Idempotency(f"sqlite:///{file}") as idem,
        contextlib.closing(sqlite3.connect(file, isolation_level=None)) as connection,
    ):
        idem.peek("any")  # makes the table
        connection.execute("CREATE TABLE accounts (id, version, state, name)")
        connection.execute("INSERT INTO accounts VALUES (7, 3, 'new', 'old')")
        connection.execute("BEGIN")
        yield {
            "charge": lambda: "paid",
            "connection": connection,
            "file": file,
            "idem": idem,
        }
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if default._default._engine is not None:
        default._default._engine.close()


@pytest.mark.parametrize("name", with_examples())
def test_the_example_of_a_docstring_runs(name, surroundings):
    thing = with_examples()[name]
    module = importlib.import_module(getattr(thing, "__module__", None) or "semel.engine.facade")
    asynchronous = "await " in thing.__doc__ or "async with" in thing.__doc__
    names = {
        **vars(semel),
        **vars(semel.repair),
        "app": fastapi.FastAPI(),
        **vars(module),
        **surroundings,
        "__name__": "example",
    }
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing))
    if asynchronous:
        asyncio.run(run_async(examples, names))
        return
    for example in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            eval(compile(example.source, name, "single"), names)  # noqa: S307 - our own text
        check(example, printed)


async def run_async(examples: list[doctest.Example], names: dict[str, Any]) -> None:
    """Run examples that await at their top level."""

    async def charge() -> str:
        return "paid"

    async with (
        AsyncIdempotency(f"sqlite:///{names['file']}") as idem,
        aiosqlite.connect(names["file"], isolation_level=None) as connection,
    ):
        names["connection"].execute("ROLLBACK")
        await connection.execute("BEGIN")
        names |= {"charge": charge, "connection": connection, "idem": idem}
        for example in examples:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                code = compile(example.source, "example", "single", flags)
                running = eval(code, names)  # noqa: S307 - our own text
                if inspect.iscoroutine(running):
                    await running
            check(example, printed)
        await connection.execute("ROLLBACK")


def check(example: doctest.Example, printed: io.StringIO) -> None:
    got = printed.getvalue()
    same = doctest.OutputChecker().check_output(example.want, got, doctest.ELLIPSIS)
    assert same, f"{example.source}gave {got}, not {example.want}"
