"""Compares the speed of this checkout with that of another commit: `make bench-paired BASE=...`.

Both versions run in processes of their own, at the same time, on the same private servers, and take
turns: a lap of one, a lap of the other, then in the opposite order. What is shown is the median of
the laps' ratios (above 1: this checkout is faster), and the middle half of them. "computing" is the
same ratio by the computing time of the process that calls, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import backends

ROOT = Path(__file__).resolve().parents[1]
CALLERS = {"threads": (1, 8, 16), "tasks": (1, 64), "fastapi": (16,)}
ALLOWED = 0.95
"""A median below this is called slower."""


class Scenario(NamedTuple):
    """What both versions do."""

    store: str
    kind: str
    verb: str
    callers: int

    def __str__(self) -> str:
        who = f"{self.callers} {'tasks' if self.kind == 'fastapi' else self.kind}"
        where = "FastAPI, " if self.kind == "fastapi" else ""
        return f"{self.store}: {self.verb}, {where}{who}"


class Side:
    """One version of semel, in a process of its own."""

    def __init__(self, source: Path, kind: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.paired_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        self.ask({"kind": kind, "with": options})

    def ask(self, message: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a side of the comparison has ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def compare(
    scenario: Scenario, where: dict[str, str], sources: list[Path], effort: argparse.Namespace
) -> bool:
    """Print the ratio of one scenario; True unless it is slower."""
    options = {**where, "verb": scenario.verb, "callers": scenario.callers}
    base, here = sides = [Side(source, scenario.kind, options) for source in sources]
    for side in sides:
        side.ask(effort.seconds)  # warms up
    ratios, computing, rates = [], [], []
    for lap in range(effort.rounds):
        order = sides if lap % 2 else sides[::-1]
        measured = {side: side.ask(effort.seconds) for side in order}
        (rate, computed), (base_rate, base_computed) = measured[here], measured[base]
        ratios.append(rate / base_rate)
        computing.append(computed / base_computed)
        rates.append(rate)
    for side in sides:
        side.close()
    low, median, high = statistics.quantiles(ratios, n=4)
    slower = median < ALLOWED
    print(
        f"{scenario!s:42} {median:5.2f}  ({low:.2f} to {high:.2f})"
        f"  computing {statistics.median(computing):.2f}"
        f"  {statistics.median(rates):9,.0f} calls/s{'  SLOWER' if slower else ''}",
        flush=True,
    )
    return not slower


@contextmanager
def places(stores: set[str]) -> Iterator[dict[str, dict[str, str]]]:
    """Start the servers that are needed; yields how `open_store` reaches each store."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = {
            "memory": "memory://?max_records=1000000",
            "sqlite": f"sqlite:///{folder}/records.db",
        }
        if stores & {"redis", "tiers"}:
            urls["redis"] = stack.enter_context(backends.redis_server()).url
        if stores & {"postgresql", "tiers"}:
            server = stack.enter_context(backends.postgres_server())
            urls["postgresql"] = server.fresh_database()
        if "mysql" in stores:
            urls["mysql"] = stack.enter_context(backends.mariadb_server()).database()
        found = {store: {"url": url} for store, url in urls.items()}
        if "tiers" in stores:
            found["tiers"] = {"url": urls["redis"], "behind": urls["postgresql"]}
        yield found


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Give the sources of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree / "src"
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one lap")
    parser.add_argument("--only", default="", help="part of a scenario's name")
    options = parser.parse_args()
    scenarios = [
        Scenario(store, kind, verb, callers)
        for store in ("memory", "sqlite", "redis", "postgresql", "mysql", "tiers")
        for kind, numbers in CALLERS.items()
        for callers in numbers
        for verb in ("first", "replay")
    ]
    chosen = [scenario for scenario in scenarios if options.only in str(scenario)]
    with checked_out(options.base) as base, places({each.store for each in chosen}) as found:
        sources = [base, ROOT / "src"]
        kept = [compare(each, found[each.store], sources, options) for each in chosen]
    print(f"{kept.count(False)} of {len(kept)} scenarios are slower by more than 5 %")
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
