"""The command doctor: looks whether the settings and the store are as they should be."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal, NamedTuple, TypeAlias

from semel.cli.formatting import as_json, columns, duration
from semel.cli.store import (
    NothingThere,
    hint_if_empty,
    open_deciding_store,
    open_engine,
    place_of,
    read_settings,
)
from semel.cli.stuck import abandoned
from semel.cli.terminal import coloured
from semel.core.attempts import OwnerIds
from semel.core.codec import omitted
from semel.core.keys import new_key
from semel.core.records import Identity, StuckRequest
from semel.core.settings import Settings
from semel.errors import ConfigError, StoreError, StoreRefused
from semel.stores.base import Store
from semel.sync import Idempotency

Level: TypeAlias = Literal["ok", "skipped", "warning", "problem"]
"""`skipped`: a right to look is missing. That says nothing about the store, good or bad."""

CLOCKS_APART = 5.0
"""Seconds between our clock and the store's that are worth a word. Nothing depends on them."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    level: Level
    about: str
    text: str


def doctor(options: Namespace) -> int:
    """Look at the settings and at the store."""
    settings = read_settings(options)
    findings = list(_settings(settings))
    try:
        with open_engine(options) as engine:
            findings.append(Finding("ok", "store", place_of(settings)))
            try:
                findings += _store(engine, options)
            except (StoreError, ConfigError) as error:
                findings.append(Finding("problem", "store", str(error)))
    except NothingThere as error:
        findings.append(Finding("problem", "store", str(error)))
    if options.json:
        print(as_json([finding._asdict() for finding in findings]))
    else:
        print(columns(("RESULT", "ABOUT", ""), findings, colour=coloured(sys.stdout)))
    return 0 if all(finding.level in {"ok", "skipped"} for finding in findings) else 1


def _settings(settings: Settings) -> Iterator[Finding]:
    yield Finding(
        "ok", "settings", f"environment {settings.environment}, {len(settings.scopes)} scopes"
    )
    if settings.disabled:
        yield Finding("warning", "settings", "idempotency is disabled: every call runs unprotected")


def _store(engine: Idempotency, options: Namespace) -> Iterator[Finding]:
    store = engine.internals.store
    identity = Identity("semel.doctor", new_key())
    behind = read_settings(options).behind
    if behind is None:
        yield from _written_and_read(store, identity)
        yield from _diagnosed(store)
    else:
        # By itself: it decides, and what is written to it alone is forgotten without the front.
        with closing(open_deciding_store(options, create=False)) as deciding:
            yield from _written_and_read(deciding, identity)
            yield from _diagnosed(deciding)
        yield _front(store, identity, behind.partition("://")[0])
    empty = hint_if_empty(engine, options)
    if empty is not None:
        yield Finding("warning", "records", empty)
    if StuckRequest not in store.unsupported:
        found = abandoned(store)
        text = f"{found.text}: see semel stuck" if found.records else found.text
        yield Finding("warning" if found.counts() else "ok", "stuck", text)


def _diagnosed(store: Store) -> Iterator[Finding]:
    """Ask the server whose word counts: what a front forgets, SQL still has."""
    try:
        for danger in store.diagnose():
            yield Finding("warning", "server", danger)
    except StoreRefused as error:
        yield Finding("skipped", "server", f"its settings were not checked: {error}")
    except StoreError as error:
        yield Finding("warning", "server", f"its settings could not be read: {error}")


def _front(tiers: Any, identity: Identity, behind: str) -> Finding:
    """Ask for the one thing that needs an answer of the front: to forget."""
    try:
        tiers.forget(identity)
    except StoreError as error:
        return Finding(
            "warning",
            "front",
            f"it is unreachable, and {behind} decides alone: calls are slower, not wrong; only "
            f"forget fails until it is back ({error.__cause__ or error})",
        )
    return Finding("ok", "front", "it is reachable")


def _written_and_read(store: Any, identity: Identity) -> Iterator[Finding]:
    """Write a record of our own, read it back, and remove it."""
    started, wall = time.monotonic(), time.time()
    store.put(identity, omitted("written by semel doctor"), 60.0, owner=OwnerIds().next())
    record = store.get(identity)
    store.forget(identity)
    took = time.monotonic() - started
    if record is None:
        yield Finding("problem", "store", "the record that was just written is missing")
        return
    yield Finding("ok", "store", f"written, read and removed a record in {took * 1000:.1f} ms")
    apart = record.now - (wall + took / 2)
    level: Level = "ok" if abs(apart) < CLOCKS_APART + took else "warning"
    yield Finding(level, "clock", f"the store's clock is {duration(apart)} from this one")
