"""How long `import semel` takes, beside `import msgspec, asyncio, sqlite3`, which it needs.

Fresh interpreters, bytecode compiled, in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.figures import OURS, Lane, Race, Section, at_most
from benchmarks.measuring import Effort

LIMIT = 1.8
ROUNDS = 15
FLOOR = "msgspec, asyncio, sqlite3"
MEASURE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def run(effort: Effort) -> list[Section]:
    """Start interpreters in turn."""
    for modules in (FLOOR, OURS):
        _milliseconds(modules)  # compiles the bytecode
    rounds = [(_milliseconds(FLOOR), _milliseconds(OURS)) for _ in range(effort.rounds(ROUNDS))]
    floor, ours = (list(column) for column in zip(*rounds, strict=True))
    race = Race(
        "import",
        "ms",
        [Lane(OURS, "ours", ours), Lane(FLOOR, "floor", floor)],
        more_is_better=False,
    )
    ratio = race.ratio(OURS, FLOOR)
    return [Section("Import", "", [race], [at_most(0, "import semel, to its parts", ratio, LIMIT)])]


def _milliseconds(modules: str) -> float:
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE.format(modules)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # else files are compiled each time
        check=True,
        capture_output=True,
        text=True,
    )
    return float(ran.stdout) * 1e3
