"""A person decides: one record, one outcome, under the same rules as a reconciler."""

from __future__ import annotations

from typing import Any

from semel.aio import AsyncIdempotency
from semel.core.policy import Duration
from semel.core.records import Identity, Record
from semel.engine.setup import Setup
from semel.errors import ConfigError, IdempotencyError, raise_about
from semel.repair.decisions import Audit, Decision, Failed, Succeeded
from semel.repair.desk import Desk
from semel.repair.steps import Steps, ask, run, run_async
from semel.sync import Idempotency


def settle(
    idempotency: Idempotency,
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str = "default",
    ttl: Duration | None = None,
    name: str | None = None,
    audit: Audit | None = None,
) -> Decision | None:
    """Decide what became of the attempt of a `key` in a `scope`; None = there is none to decide.

    `idempotency` is the engine, and `resolution` what was found out: `Succeeded(value)` or
    `Failed(error)`. `name` and `audit` say who decides, and where that is written. The outcome is
    kept for `ttl`, or as long as the engine's policy of the scope says; the decision says until
    when. A held attempt whose policy the engine does not know needs `ttl`.

    Examples:
        >>> settle(idem, "order:42", Succeeded("ch_42"), scope="payments", ttl=3 * 86400) is None
        True
    """
    return run(_settled(idempotency, key, resolution, scope=scope, ttl=ttl, name=name, audit=audit))


async def settle_async(
    idempotency: AsyncIdempotency,
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str = "default",
    ttl: Duration | None = None,
    name: str | None = None,
    audit: Audit | None = None,
) -> Decision | None:
    """`settle`, awaited."""
    return await run_async(
        _settled(idempotency, key, resolution, scope=scope, ttl=ttl, name=name, audit=audit)
    )


def _settled(
    engine: Setup[Any],
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str,
    ttl: Duration | None,
    name: str | None,
    audit: Audit | None,
) -> Steps[Decision | None]:
    if not isinstance(resolution, Succeeded | Failed):
        raise ConfigError(
            f"a person decides Succeeded(...) or Failed(...), not {type(resolution).__name__}"
        )
    desk = Desk(engine, name=name, ttl=ttl, audit=audit)
    identity = engine._identity(key, scope)
    try:
        return (yield from _decided(desk, identity, resolution))
    except IdempotencyError as error:
        raise_about(error, identity)


def _decided(
    desk: Desk, identity: Identity, resolution: Succeeded | Failed
) -> Steps[Decision | None]:
    found: Record | None = yield ask(desk.store.get, identity)
    if found is not None and found.abandoned and not desk.knows_ttl(found, resolution):
        raise ConfigError(
            "the attempt is held, and neither the settings nor the engine name its scope "
            f"{identity.scope!r}: its outcome might be forgotten too early, and its effect be "
            "repeated. Pass ttl (--ttl) with the value of the policy in the program, or name the "
            "scope in the settings"
        )
    record = yield from desk.adopt(identity)
    if record is None:
        return None
    stored = yield from desk.write(record, resolution)
    decision = desk.decision(record, resolution, stored=stored)
    desk.tell(decision)
    return decision
