"""What a call costs as the table grows: from 1,000 to 1,000,000 records, on request 10,000,000.

One caller; times are told as ratios to those at 1,000 records. A line that stays near 1 is flat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from benchmarks import backends
from benchmarks.contenders.commands import TABLE
from benchmarks.contenders.ours import SEMEL
from benchmarks.contenders.postgres_floors import PSYCOPG
from benchmarks.contenders.sqlite_floors import BARE_SQLITE
from benchmarks.figures import OURS, Lane, Race, Role, Section
from benchmarks.filling import SEMEL_ON_POSTGRES, fill_postgres, fill_sqlite
from benchmarks.measuring import Effort, Place, ThreadContender, Work
from benchmarks.racing import race
from semel import Idempotency

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ON_REQUEST = 10_000_000
ROUNDS = 7
SETTLING = 0.5


def run(effort: Effort) -> list[Section]:
    """Grow a table on SQLite and one on PostgreSQL."""
    sizes = (10, 20) if effort.smoke else SIZES + ((ON_REQUEST,) if effort.big else ())
    with backends.sqlite() as url:
        on_sqlite = _section(
            "SQLite",
            url,
            BARE_SQLITE,
            lambda size: fill_sqlite(url, TABLE, size),
            sizes=sizes,
            effort=effort,
        )
    with backends.postgres_server(durable=effort.durable) as server:
        place = server.fresh_database()
        on_postgres = _section(
            "PostgreSQL with fsync",
            place,
            PSYCOPG,
            lambda size: fill_postgres(place, TABLE, SEMEL_ON_POSTGRES, size),
            sizes=sizes,
            effort=effort,
        )
    return [on_sqlite, on_postgres]


def _section(
    store: str,
    url: str,
    floor: ThreadContender,
    fill: Callable[[int], None],
    *,
    sizes: tuple[int, ...],
    effort: Effort,
) -> Section:
    with closing(Idempotency(url)) as idem:
        idem.execute("seed", Work().run)
    lanes: dict[tuple[str, str], list[Lane]] = {}
    for size in sizes:
        fill(size)
        time.sleep(0 if effort.smoke else SETTLING)
        both = race(
            (SEMEL, floor),
            Place(url, Work()),
            callers=1,
            rounds=effort.rounds(ROUNDS),
            effort=effort,
        )
        for kind, one in zip(("first", "replay"), both, strict=True):
            for lane in one.lanes:
                times = [1e6 / rate for rate in lane.samples]
                role: Role = "floor" if size == sizes[0] else "usual"
                lanes.setdefault((lane.name, kind), []).append(
                    Lane(f"{size:,} records", role, times)
                )
    races = [
        Race(f"{kind}, {name}", "us", found, more_is_better=False)
        for (name, kind), found in lanes.items()
    ]
    flat = ", ".join(
        f"{race.what} {grown:.2f}"
        for race in races
        if OURS in race.what
        and (grown := race.ratio(race.lanes[-1].name, race.lanes[0].name)) is not None
    )
    return Section(
        f"As the table grows, {store}",
        f"At {sizes[-1]:,} records, as a ratio to {sizes[0]:,}: {flat}.",
        races,
    )
