# Generated from adapters/integration.py by `make generate`: change that file instead.
"""How one protected request is handled on a thread, whatever the framework.

`Integration.begin` claims the request's key, or answers it. `Exchange` records the end of
a request that runs, before the last of its answer leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar, Final

from msgspec import Struct

from semel.adapters.integration import Engines, Here, awaited
from semel.core.attempts import Attempt
from semel.core.decide import UnstoredResponse
from semel.engine.setup import Call
from semel.errors import IdempotencyError
from semel.http.options import chosen
from semel.http.requests import HeaderLine, Request
from semel.http.rules import BODY, Operation, Rejected, RouteRules, Routing, TenantCheck
from semel.http.storing import Answer
from semel.sync import Idempotency

LARGE: Final = 64 * 1024
"""Bytes from which on an answer is large: it is copied several times on its way to the store."""


class Integration:
    """An engine and the rules of the requests that come to it.

    A framework may have a class of its own: with another `exchange`, or more to do in a hook.
    """

    exchange: ClassVar[type[Exchange]]

    def __init__(self, idempotency: Idempotency | str, options: dict[str, Any]) -> None:
        self.opened_here = isinstance(idempotency, str)
        self.tenants = TenantCheck()
        self.engines = Engines(idempotency)
        self.engine = engine = self.engines.first
        self.routing = Routing(
            resolved=engine.internals.setup.rules,
            key_pattern=engine.internals.setup.key_rules.pattern,
            **options,
        )

    def rules_for(self, options: dict[str, Any]) -> RouteRules:
        """Make the rules of one endpoint, for a decorator."""
        engine = self.engine
        return RouteRules(
            chosen(options), engine.internals.setup.rules, engine.internals.setup.key_rules.pattern
        )

    def prepare(
        self, rules: RouteRules, request: Request, read: Callable[[], bytes]
    ) -> Call | None:
        """Prepare the call of a request; None = it is not protected."""
        waiting, given = rules.identify(request), None
        try:
            while True:
                need = waiting.send(given)
                given = read() if need is BODY else self.awaited(need)
        except StopIteration as end:
            return self.call_of(rules, end.value)

    def call_of(self, rules: RouteRules, found: Operation | None) -> Call | None:
        """Return the call of the operation that a request was found to be."""
        if found is None:
            return None
        self.tenants.check(rules.choices)
        return Call(found.identity, found.fingerprint, rules.policy)

    def begin(
        self, rules: RouteRules, request: Request, read: Callable[[], bytes]
    ) -> Exchange | Answer | None:
        """Claim the request's key: run it, answer it with this, or (None) let it pass."""
        try:
            call = self.prepare(rules, request, read)
            if call is None:
                return None
            self.before_claim()
            here = self.engines.here()
            attempt = here.engine.internals.begin(call)
            if attempt.replayed:
                return rules.replay(attempt.result, call.identity)
        except (IdempotencyError, Rejected) as error:
            return rules.rejection(error)
        return self.exchange(here, rules, call, attempt, request.raw)

    def before_claim(self) -> None:
        """Raise a ConfigError where a key must not be claimed; a hook of frameworks."""

    def awaited(self, given: Any) -> Any:
        """Return what a function of the application returned, which may be async; a hook."""
        return awaited(given)

    def close(self) -> None:
        """Close the engine that is used here, if it was opened here."""
        if self.opened_here:
            self.engines.close()


class Exchange(Struct, eq=False):
    """One request that runs: entered, then ended by its answer or by an error."""

    here: Here
    rules: RouteRules
    _call: Call
    _attempt: Attempt
    raw: object
    """The framework's own request."""
    ended: bool = False
    raises: bool = False
    """The answer was raised by the handler, as an error."""

    def enter(self) -> None:
        """Become the current attempt of this context."""
        self._attempt.__enter__()

    def answered(
        self, status: int, lines: Iterable[HeaderLine], body: bytes | None
    ) -> Answer | None:
        """Record an answer before its last byte leaves; returns what has to go out instead."""
        decision = self.rules.decide(status, lines)
        if decision != "store":
            self._leave()
            if decision == "forget":
                self.rules.log_redirect(status, self.raw)
            outcome = None if decision == "failure" else decision
            undone = UnstoredResponse(f"answered with {status}", outcome)
            self.here.engine.internals.failed(self._call, self._attempt, undone)
            return None
        try:
            if body is None or len(body) < LARGE:
                self._save(status, lines, body)
            else:
                self._save_in_turn(status, lines, body)
        except IdempotencyError as error:  # another attempt took over: its answer counts
            return self.rules.rejection(error)
        return None

    def _save_in_turn(self, status: int, lines: Iterable[HeaderLine], body: bytes) -> None:
        """Save a large answer, when few others are being saved."""
        try:
            turn = self.here.large.get()
        except BaseException:
            # Interrupted before its turn: the effect is done, and a retry must not repeat it.
            with suppress(IdempotencyError):
                self._save(status, lines, body)
            raise
        try:
            self._save(status, lines, body)
        finally:
            self.here.large.give(turn)

    def _save(self, status: int, lines: Iterable[HeaderLine], body: bytes | None) -> Any:
        stored = self.rules.stored(status, lines, body)
        self._leave()  # Not before: an answer that cannot be packed is a failure, for `raised`.
        return self.here.engine.internals.succeeded(self._call, self._attempt, stored)

    def unprotected(self) -> None:
        """Free the key: the answer goes out live, and nothing is stored of it."""
        self._leave()
        self.here.engine.internals.failed(
            self._call, self._attempt, UnstoredResponse("a live stream", "forget")
        )

    def raised(self, error: BaseException) -> None:
        """Record that the handler raised, as the policy says of failures."""
        self._leave()
        self.here.engine.internals.failed(self._call, self._attempt, error)

    def _leave(self) -> None:
        self.ended = True
        self._attempt.__exit__(None, None, None)


Integration.exchange = Exchange
