"""A person decides: one record, one outcome, under the same rules as a reconciler."""

from __future__ import annotations

from typing import Any

from semel.aio import AsyncIdempotency
from semel.core.records import Record
from semel.engine.setup import Setup
from semel.errors import ConfigError
from semel.repair.audit import Audit
from semel.repair.decisions import Decision
from semel.repair.desk import Desk
from semel.repair.outcomes import Failed, Resolution, Succeeded
from semel.repair.steps import Steps, run, run_async
from semel.sync import Idempotency


def settle(
    idempotency: Idempotency,
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str = "default",
    name: str | None = None,
    audit: Audit | None = None,
) -> Decision | None:
    """Decide what became of an abandoned attempt; None = the key has none."""
    return run(_settled(idempotency, key, resolution, scope=scope, name=name, audit=audit))


async def settle_async(
    idempotency: AsyncIdempotency,
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str = "default",
    name: str | None = None,
    audit: Audit | None = None,
) -> Decision | None:
    """`settle`, awaited."""
    return await run_async(
        _settled(idempotency, key, resolution, scope=scope, name=name, audit=audit)
    )


def _settled(
    engine: Setup[Any],
    key: str,
    resolution: Succeeded | Failed,
    *,
    scope: str,
    name: str | None,
    audit: Audit | None,
) -> Steps[Decision | None]:
    if not isinstance(resolution, Succeeded | Failed):
        raise ConfigError(
            f"a person decides Succeeded(...) or Failed(...), not {type(resolution).__name__}"
        )
    desk = Desk(engine, name=name, audit=audit)

    def decide(_: Record) -> Steps[Resolution]:
        yield from ()
        return resolution

    settled = yield from desk.settle(engine._identity(key, scope), decide)
    if settled is None:
        return None
    decision = desk.decision(settled.record, resolution, stored=settled.stored)
    desk.tell(decision)
    return decision
