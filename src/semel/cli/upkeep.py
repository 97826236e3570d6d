"""Commands that keep a store in order: purge, reconcile, migrate.

Each takes the parsed options and returns the exit code.
"""

from __future__ import annotations

import importlib
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from semel.cli.audit import user
from semel.cli.deciding import audit_of
from semel.cli.formatting import duration
from semel.cli.store import open_deciding_store, open_engine
from semel.cli.stuck import abandoned
from semel.cli.terminal import Progress, say
from semel.core.stop import Stop
from semel.errors import ConfigError, StoreError
from semel.repair import GaveUp, Report, Unresolved, purge
from semel.repair._sync.reconcile import Reconciliation
from semel.repair._sync.resolve import Decider
from semel.repair.maintenance import store_of
from semel.stores.base import Migrating
from semel.sync import Idempotency


def purge_records(options: Namespace) -> int:
    """Remove expired records, once or again and again."""
    said = _Said()
    with open_engine(options) as engine:

        def once(_: Callable[[], bool]) -> int:
            with Progress() as progress:
                removed = purge(
                    engine,
                    batch=options.batch,
                    pause=options.pause,
                    abandoned_after=options.abandoned_after,
                    name=user(options),
                    reason=options.reason,
                    progress=lambda so_far: progress.show(f"{so_far:,} records removed"),
                )
            said.print(f"removed {removed} records", news=removed > 0)
            return 0

        return _repeated(once, options.every)


def reconcile(options: Namespace) -> int:
    """Let resolvers say what became of stuck records, once or again and again."""
    resolvers, said = _imported(options.resolvers), _Said()
    with open_engine(options) as engine:
        reconciliation = Reconciliation(
            Decider(engine, name=user(options), audit=audit_of(options), reason=options.reason),
            resolvers,
            older_than=options.older_than,
            max_tries=options.max_tries,
        )

        def once(stopped: Callable[[], bool]) -> int:
            with Progress() as progress:
                report = reconciliation.run(
                    full=options.full, stopped=stopped, progress=progress.show
                )
            code = _reported(report, said)
            if options.every is None:  # A loop looks into them later.
                _say_too_young(engine, options.older_than)
            return code

        return _repeated(once, options.every)


def _say_too_young(engine: Idempotency, older_than: float) -> None:
    left = abandoned(store_of(engine)).records
    if any(record.abandoned_for < older_than for record in left):
        age = duration(older_than)
        say(f"attempts that have been stuck for less than {age} are left: see --older-than")


def migrate(options: Namespace) -> int:
    """Make the tables of the store, or bring them up to date."""
    with closing(open_deciding_store(options, create=True)) as store:
        if not isinstance(store, Migrating):
            print("this store creates what it needs by itself: nothing to migrate")
        elif options.print:
            print(store.migration())
        else:
            print(f"the table is at version {store.migrate()}")
    return 0


class _Said:
    """Prints the first line, and after it only news: a loop that finds nothing stays silent."""

    def __init__(self) -> None:
        self._last: str | None = None

    def print(self, line: str, *, news: bool) -> None:
        """Print a line that has news, or differs from the one before."""
        if news or line != self._last:
            print(line, flush=True)
        self._last = line


def _reported(report: Report, said: _Said) -> int:
    unresolved = sum(isinstance(each, Unresolved) for each in report.decisions)
    gave_up = sum(isinstance(each, GaveUp) for each in report.decisions)
    said.print(
        f"resolved {report.resolved}, unresolved {unresolved}, gave up {gave_up}, "
        f"moved on {report.moved_on}, errors {report.errors}, "
        f"waiting for a person {report.waiting}",
        news=report.resolved > 0,
    )
    return 1 if unresolved or report.errors or report.waiting else 0


def _repeated(once: Callable[[Callable[[], bool]], int], every: float | None) -> int:
    """Do it once; or until a signal says stop, whatever one round may meet.

    A round can ask whether it has to end early.
    """
    stopped = Stop()
    if every is None:
        return once(stopped.is_set)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    while True:
        try:
            once(stopped.is_set)
        except StoreError as error:
            say(f"semel: {error}; trying again")
        if stopped.wait(every):
            return 0


def _imported(path: str) -> Mapping[str, Any]:
    """Import `module:attribute`, from the working directory too."""
    name, colon, attribute = path.partition(":")
    if not name or not colon or not attribute:
        raise ConfigError(f"--resolvers takes module:attribute, not {path!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        resolvers = getattr(importlib.import_module(name), attribute)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise
        raise ConfigError(f"there is no module {name}") from missing
    except AttributeError as missing:
        raise ConfigError(f"the module {name} has no {attribute}") from missing
    finally:
        sys.path.pop(0)
    if not isinstance(resolvers, Mapping):
        raise ConfigError(f"{path} must be a mapping from scope to resolver")
    return resolvers
