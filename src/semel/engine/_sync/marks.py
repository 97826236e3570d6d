# Generated from engine/marks.py by `make generate`: change that file instead.
"""Marks: the plain "was it done?" on the same records that the engine keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from msgspec import UNSET, UnsetType

from semel.core.audit import not_written, request_for
from semel.core.policy import Duration, Policy
from semel.core.records import Identity, PutRequest, Record, State
from semel.core.run_info import process_name
from semel.engine.outcomes import stored_form
from semel.errors import (
    ConfigError,
    IdempotencyError,
    InvalidKey,
    ResultUnavailable,
    StoreError,
    about,
    raise_about,
)
from semel.stores.base import ScanRequest, Store
from semel.stores.urls import open_store
from semel.transactions import warn_inside

if TYPE_CHECKING:
    from semel.engine._sync.facade import Idempotency
    from semel.engine._sync.runs import Runs

D = TypeVar("D")


class Marks:
    """The marks of one engine, `idem.marks`.

    The records are those of `execute` and `consume`: after one of them finishes, `check` returns
    True. Each `key` (or each of several `keys`) belongs to a `scope`. `ttl` is how long to keep a
    mark; without it, the policy decides. `returns` is the class that a result is read as. A result
    of 0, "", [], or None is a result like any other.

    Examples:
        >>> idem.marks.set_result("order:42", "paid", ttl=3600)
        True
        >>> idem.marks.get_result("order:42")
        'paid'
    """

    def __init__(self, engine: Idempotency) -> None:
        self._engine = engine

    def check(self, key: str, *, scope: str = "default") -> bool:
        """Return whether the operation is done. One that still runs is not done."""
        return _done(self._get(key, scope))

    def exists(self, key: str, *, scope: str = "default") -> bool:
        """Return whether the key has a record: done, failed, or running."""
        return self._get(key, scope) is not None

    def set(self, key: str, *, ttl: Duration | None = None, scope: str = "default") -> bool:
        """Mark as done; return False if it is done or running already."""
        return self.set_result(key, None, ttl=ttl, scope=scope)

    def do(
        self,
        key: str,
        fn: Callable[[], object],
        *,
        ttl: Duration | None = None,
        scope: str = "default",
    ) -> bool:
        """Run `fn` unless it was done; return True if it ran now, False if it was done before.

        While another call is running it, raise `ConcurrentRequest`: that is not "done".
        """
        return self._engine.consume(key, fn, scope=scope, ttl=ttl)

    def set_result(
        self, key: str, value: object, *, ttl: Duration | None = None, scope: str = "default"
    ) -> bool:
        """Mark as done with the result `value`; return False if it is done or running already."""
        request = self._put(key, value, ttl, scope)
        try:
            return self._store.ask(request)
        except IdempotencyError as error:
            raise_about(error, request.identity)

    def get_result(
        self,
        key: str,
        default: D | UnsetType = UNSET,
        *,
        scope: str = "default",
        returns: type | None = None,
    ) -> object | D:
        """Return the stored result; without one, `default`, or raise `ResultUnavailable`."""
        record = self._get(key, scope)
        if record is None or not _done(record):
            if default is UNSET:
                missing = ResultUnavailable("this key is not marked as done")
                raise about(missing, self._runs.setup.identity(key, scope))
            return default
        return self._read(record, returns)

    def delete(self, key: str, *, scope: str = "default") -> bool:
        """Remove the mark in any state; return False if there was none."""
        identity = self._runs.setup.identity(key, scope)
        return self._forget([identity])[0]

    def ttl(self, key: str, *, scope: str = "default") -> float | None:
        """Return the seconds until a finished mark expires, or None if there is none."""
        record = self._get(key, scope)
        return None if record is None else record.remaining

    def refresh(self, key: str, *, ttl: Duration | None = None, scope: str = "default") -> bool:
        """Keep a finished mark for a whole `ttl` from now; return False if there is none."""
        runs = self._runs
        identity = runs.setup.identity(key, scope)
        try:
            return self._store.touch(identity, self._seconds(ttl, scope))
        except IdempotencyError as error:
            raise_about(error, identity)
        finally:
            runs.forgotten(identity)

    def clear(self, prefix: str, *, scope: str = "default") -> int:
        """Remove finished records whose key begins with `prefix`, and return how many.

        "" removes the whole scope. Running, abandoned, and held records stay: `delete` removes one
        of those, if you know what it did. semel writes an entry to the audit trail first.
        """
        if not isinstance(prefix, str):
            given = type(prefix).__name__
            raise InvalidKey(f'the prefix must be a str ("" = every key), not {given}')
        store = self._store
        if ScanRequest in store.unsupported:
            raise ConfigError(f"{type(store).__name__} cannot list its keys, so it cannot clear")
        self._runs.setup.key_rules.check_scope(scope)
        self._enter_clearing(store, prefix, scope)
        removed = 0
        cursor: str | None = None
        while True:
            page = store.scan(scope=scope, prefix=prefix, limit=500, cursor=cursor)
            for record in page.records:
                if record.state is not State.PROCESSING:
                    removed += self._expire(store, record.identity)
            cursor = page.cursor
            if cursor is None:
                return removed

    def _enter_clearing(self, store: Store, prefix: str, scope: str) -> None:
        """Write into the audit trail that records are about to be removed; else none may be."""
        which = f"with a prefix of {len(prefix)} characters" if prefix else "all"
        said = {"by": process_name(), "action": "clear", "scope": scope, "details": which}
        answer: bool | StoreError
        try:
            answer = store.ask(request_for(said))
        except StoreError as error:
            answer = error
        if answer is not True:
            raise not_written(answer)

    # --- many at once: one round trip ----------------------------------------------------

    def check_many(self, keys: Iterable[str], *, scope: str = "default") -> dict[str, bool]:
        """Return for each key whether its operation is done."""
        records = self._get_many(keys, scope)
        return {key: _done(record) for key, record in records.items()}

    def exists_many(self, keys: Iterable[str], *, scope: str = "default") -> dict[str, bool]:
        """Return for each key whether it has a record."""
        records = self._get_many(keys, scope)
        return {key: record is not None for key, record in records.items()}

    def set_many(
        self, keys: Iterable[str], *, ttl: Duration | None = None, scope: str = "default"
    ) -> dict[str, bool]:
        """Mark each key as done; the value is False for those that are done or running already."""
        return self.set_result_many(dict.fromkeys(_distinct(keys)), ttl=ttl, scope=scope)

    def set_result_many(
        self, results: Mapping[str, object], *, ttl: Duration | None = None, scope: str = "default"
    ) -> dict[str, bool]:
        """Mark each key of `results` as done; the value is False where it is done or running."""
        requests = [self._put(key, value, ttl, scope) for key, value in results.items()]
        answers = self._store.send(requests) if requests else []
        return {
            key: _or_raise(answer, request.identity)
            for key, request, answer in zip(results, requests, answers, strict=True)
        }

    def get_result_many(
        self, keys: Iterable[str], *, scope: str = "default", returns: type | None = None
    ) -> dict[str, object]:
        """Return the stored results by key, without the keys that are not done."""
        records = self._get_many(keys, scope)
        return {
            key: self._read(record, returns)
            for key, record in records.items()
            if record is not None and _done(record)
        }

    def delete_many(self, keys: Iterable[str], *, scope: str = "default") -> dict[str, bool]:
        """Remove each mark; the value is False where there was none."""
        wanted = _distinct(keys)
        identities = [self._runs.setup.identity(key, scope) for key in wanted]
        return dict(zip(wanted, self._forget(identities) if wanted else [], strict=True))

    # --- below -----------------------------------------------------------------------------

    @property
    def _runs(self) -> Runs:
        return self._engine.internals  # each time, which notices a fork

    @property
    def _store(self) -> Store:
        if self._runs.setup.bypassing():
            return open_store("memory://")  # where nothing is marked, and nothing stays
        warn_inside(self._runs.store)
        return self._runs.store

    def _get(self, key: str, scope: str) -> Record | None:
        identity = self._runs.setup.identity(key, scope)
        try:
            return self._store.get(identity)
        except IdempotencyError as error:
            raise_about(error, identity)

    def _get_many(self, keys: Iterable[str], scope: str) -> dict[str, Record | None]:
        wanted = _distinct(keys)
        identities = [self._runs.setup.identity(key, scope) for key in wanted]
        records = self._store.get_many(identities) if wanted else []
        return dict(zip(wanted, records, strict=True))

    def _expire(self, store: Store, identity: Identity) -> bool:
        """Remove a record if it is finished at this moment, which only the store can tell."""
        try:
            # Not `forget`: what began to run since it was listed must stay.
            return store.touch(identity, 0.0)
        except IdempotencyError as error:
            raise_about(error, identity)
        finally:
            self._runs.forgotten(identity)

    def _forget(self, identities: list[Identity]) -> list[bool]:
        try:
            return self._store.forget_many(identities)
        except IdempotencyError as error:
            if len(identities) != 1:
                raise  # a whole batch failed: it is about none of them alone
            raise_about(error, identities[0])
        finally:
            for identity in identities:
                self._runs.forgotten(identity)

    def _put(self, key: str, value: object, ttl: Duration | None, scope: str) -> PutRequest:
        runs = self._runs
        identity = runs.setup.identity(key, scope)
        try:
            result = stored_form(value, identity, runs.setup.rules(scope))
        except IdempotencyError as error:
            raise_about(error, identity)
        return PutRequest(identity, runs.owners.next(), result, self._seconds(ttl, scope))

    def _seconds(self, ttl: Duration | None, scope: str) -> float:
        words = None if ttl is None else Policy(ttl=ttl)
        return self._runs.setup.rules(scope, words).ttl

    def _read(self, record: Record, returns: type | None) -> object:
        return self._runs.setup.read(record.outcome, record.identity, returns)


def _done(record: Record | None) -> bool:
    return record is not None and record.state is State.SUCCEEDED


def _distinct(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise InvalidKey("several keys are needed; a str would be split into characters")
    return list(dict.fromkeys(keys))


def _or_raise(answer: bool | StoreError, identity: Identity) -> bool:
    if isinstance(answer, StoreError):
        raise about(answer, identity)
    return answer
