"""Runs the groups, each in a process of its own, and writes what they found."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks import chart, readme, report, stalls
from benchmarks.figures import Group, Section
from benchmarks.measuring import Effort

HERE = Path(__file__).resolve().parent

GROUPS = (
    "async_rates",
    "sync_rates",
    "crowds",
    "storms",
    "wakeups",
    "payloads",
    "memory",
    "growth",
    "overhead",
    "tally",
    "renewal",
    "imports",
    "web",
    "service",
    "queues",
)

BEFORE_OTHERS = frozenset({"wakeups"})
"""What mostly sleeps, and is about microseconds, runs before everything else on the machine, where
that is allowed. Not what computes: Linux stops such a process for 50 ms in each second."""


def main() -> int:
    options = _options()
    if options.child is not None:
        sys.stdout.buffer.write(msgspec.json.encode(_measure(options.child, _effort(options))))
        return 0
    names = options.only.split(",") if options.only else _groups()
    before: list[Group] = []
    groups: list[Group] = []
    for name in names:
        if options.twice:
            before.append(_in_a_process(name))
        groups.append(_in_a_process(name))
    text = report.write(groups, _machine(), before)
    if options.only or options.smoke:
        print(text, end="")
    else:
        (HERE / "results.md").write_text(text)
        (HERE / "chart.svg").write_text(chart.draw(groups))
        readme.update()
        print(f"wrote {HERE / 'results.md'}, {HERE / 'chart.svg'}, and the figures of the READMEs")
    return int(any(group.failed for group in groups))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--only", help=f"some of: {', '.join(GROUPS)}; prints, writes nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny counts: does it run at all?")
    parser.add_argument("--twice", action="store_true", help="each group twice: what is steady?")
    parser.add_argument("--big", action="store_true", help="grow the tables to 10,000,000 records")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _groups() -> list[str]:
    return [name for name in GROUPS if (HERE / f"{name}.py").exists()]


def _effort(options: argparse.Namespace) -> Effort:
    return Effort(smoke=options.smoke, big=options.big)


def _in_a_process(name: str) -> Group:
    """Run a group where no other has left threads, loops or garbage."""
    print(f"{time.strftime('%H:%M:%S')} {name} ...", file=sys.stderr, flush=True)
    flags = [flag for flag in ("--smoke", "--big") if flag in sys.argv]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--child", name, *flags],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        check=False,
    )
    if ran.returncode != 0:
        print(f"{name} failed", file=sys.stderr)
        absent = Section(name, "It failed: nothing was measured.", missing=[f"{name}: it failed"])
        return Group(name, 0.0, [absent], failed=True)
    group = msgspec.json.decode(ran.stdout, type=Group)
    print(f"{'':8} {name}: {group.seconds:.0f} s", file=sys.stderr, flush=True)
    return group


def _measure(name: str, effort: Effort) -> Group:
    start = time.monotonic()
    if name in BEFORE_OTHERS and not effort.smoke:
        stalls.before_others()
    try:
        sections = importlib.import_module(f"benchmarks.{name}").run(effort)
    except pytest.skip.Exception as missing:  # how the starters say that a server is not here
        sections = [Section(name, "", missing=[f"{name}: {missing}"])]
    return Group(name, time.monotonic() - start, sections)


def _machine() -> str:
    """What it ran on, as far as others need to know."""
    versions = [
        _version("redis-server", "--version", 2),
        _version("postgres", "--version", 2, "/usr/lib/postgresql/*/bin"),
        _version("mariadbd", "--version", 2, "/usr/sbin"),
    ]
    named = (
        f"{os.cpu_count()} cores ({platform.machine()})",
        f"Python {platform.python_version()}",
        *filter(None, versions),
        f"SQLite {sqlite3.sqlite_version}",
    )
    return ", ".join(named)


def _version(program: str, flag: str, word: int, elsewhere: str = "") -> str | None:
    folders = sorted(Path("/").glob(elsewhere.removeprefix("/")), reverse=True) if elsewhere else []
    found = shutil.which(program) or next(
        (place for folder in folders if (place := shutil.which(program, path=str(folder)))), None
    )
    if found is None:
        return None
    told = subprocess.run([found, flag], capture_output=True, text=True, check=False).stdout
    return f"{program} {told.split()[word]}"


if __name__ == "__main__":
    sys.exit(main())
