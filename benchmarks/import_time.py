"""How long `import semel` takes, as a ratio to `import msgspec, asyncio, sqlite3` beside it.

Fresh interpreters, bytecode compiled, rounds interleaved, medians. Exits non-zero above LIMIT.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

LIMIT = 1.8
ROUNDS = 25
FLOOR = "import msgspec, asyncio, sqlite3"
OURS = "import semel"
MEASURE = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def seconds(statement: str) -> float:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE.format(statement)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(run.stdout)


def main() -> int:
    for statement in (FLOOR, OURS):
        seconds(statement)  # compiles the bytecode
    pairs = [(seconds(FLOOR), seconds(OURS)) for _ in range(ROUNDS)]
    floor = statistics.median(pair[0] for pair in pairs)
    ours = statistics.median(pair[1] for pair in pairs)
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    print(f"{FLOOR}: {floor * 1e3:.1f} ms")
    print(f"{OURS}: {ours * 1e3:.1f} ms")
    print(f"ratio: {ratio:.2f} (at most {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
