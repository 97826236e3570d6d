"""Kill processes in the middle of their transfers, many times, on every database.

    make soak-transactions                    500 kills each
    make soak-transactions KILLS=50 MINUTES=5

The books are compared after every kill; the first difference ends the run with an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from servers.mariadb import mariadb_server
from servers.postgres import postgres_server
from transactions.transfers import Bank

KILLS = int(os.environ.get("KILLS", "500"))
SECONDS = 60 * float(os.environ.get("MINUTES", "30"))
LONGEST = 0.05
"""Seconds from the first transfer of a process to its kill, at most."""
FRESH = 50
"""Kills after which a new database is begun: comparing the books of one grows with it."""


@contextlib.contextmanager
def databases() -> Iterator[dict[str, Iterator[str]]]:
    """For each kind of database, the URLs of as many empty ones as are asked for."""
    with (
        tempfile.TemporaryDirectory(prefix="semel-soak-") as folder,
        postgres_server() as postgres,
        mariadb_server() as mariadb,
    ):
        yield {
            "PostgreSQL": iter(postgres.fresh_database, None),
            "MariaDB": iter(mariadb.database, None),
            "SQLite": (f"sqlite:///{folder}/{number}.db" for number in range(KILLS)),
        }


def soak(name: str, urls: Iterator[str], folder: Path, deadline: float) -> bool:
    """Kill until it is enough or the time is up; tells whether it was enough."""
    began = time.monotonic()
    kills = transfers = 0
    met: dict[str, int] = {}
    while kills < KILLS and time.monotonic() < deadline:
        count = 0
        with contextlib.closing(Bank(next(urls), folder)) as bank:
            while bank.kills < min(FRESH, KILLS - kills) and time.monotonic() < deadline:
                bank.kill_at_random(LONGEST)
                count = bank.check()
        kills, transfers = kills + bank.kills, transfers + count
        for place, times in bank.met.items():
            met[place] = met.get(place, 0) + times
    places = ", ".join(f"{place} {times}" for place, times in sorted(met.items()))
    print(
        f"{name}: {kills} of {KILLS} kills in {time.monotonic() - began:.0f} s, {transfers} "
        f"transfers, effects equal records after each. Threads were met: {places}",
        flush=True,
    )
    return kills == KILLS


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of the servers' own stop
    with databases() as found, tempfile.TemporaryDirectory(prefix="semel-soak-") as folder:
        enough = True
        for place, (name, urls) in enumerate(found.items()):
            share = (SECONDS - (time.monotonic() - BEGAN)) / (len(found) - place)
            enough &= soak(name, urls, Path(folder), time.monotonic() + share)
    print("all kills done" if enough else "the time was up before all kills were done")
    return 0


BEGAN = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
