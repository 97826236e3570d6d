"""Django: the connection of an alias, or `django.db.connection` itself.

Savepoints are those of `transaction.atomic()`: Django then knows what was undone, and drops the
`on_commit` hooks that belonged to it. The statements go to the driver's connection underneath.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from semel.errors import ConfigError
from semel.stores.sql.verbs import Reply, Statement
from semel.transactions import families
from semel.transactions.links import Nested, no_transaction


class DjangoLink:
    """A database of a Django project."""

    def __init__(self, given: Any) -> None:
        if isinstance(given, str):
            given = _of_alias(given)
        self._wrapper = given
        self.dialect: str = given.vendor

    def begin(self) -> Nested:
        """Enter an inner `atomic()`, which is a savepoint."""
        if not self._wrapper.in_atomic_block:
            raise no_transaction("use `with transaction.atomic():` around it")
        # First: a driver that is not known must be refused before anything is entered.
        self._driver = families.link_to(self._wrapper.connection, asynchronous=False)
        return _Atomic(self._wrapper.alias)

    def execute(self, statement: Statement) -> Reply:
        """Run one statement on the driver's connection."""
        return self._driver.execute(statement)


def _of_alias(alias: str) -> Any:
    # No other text is shown than that of an alias: a URL may hold a password.
    try:
        known = list(connections)
    except ImproperlyConfigured as error:
        raise ConfigError(
            "a text is the alias of a Django database, and Django has no settings here: set "
            "DJANGO_SETTINGS_MODULE and call django.setup(), or give the connection itself"
        ) from error
    if alias not in known:
        raise ConfigError(f"Django's DATABASES has no such alias; it has {', '.join(known)}")
    return connections[alias]


class _Undo(Exception):
    """Tells `atomic()` to roll back; it never leaves this module."""


class _Atomic:
    """An inner `atomic()`, from its entry on."""

    def __init__(self, alias: str) -> None:
        self._atomic: Any = transaction.atomic(using=alias)
        self._atomic.__enter__()

    def commit(self) -> None:
        """Leave it."""
        self._atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        """Leave it by an error."""
        error = _Undo()
        self._atomic.__exit__(_Undo, error, error.__traceback__)
