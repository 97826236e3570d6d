"""Writes the figures of the READMEs from results.md: `python -m benchmarks.readme`.

Only what stands between the two marks of a README changes. A test fails when a figure there is not
the one in results.md. Nothing is measured here.
"""

# ruff: noqa: RUF001 - Chinese has its own punctuation
from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.md"
AHEAD_THERE = re.compile(r"semel is ahead in (\d+) of (\d+)")
MARKED = re.compile(r"(<!-- figures: .* -->\n)(?:.*\n)*?(<!-- end of figures -->)")

BY_HAND = ("redis-py Lock and cache-aside", "by hand: insert on conflict")
CONTENDERS = (
    "**semel**",
    BY_HAND,
    "idemkit",
    "aws-lambda-powertools",
    "DBOS",
    "celery-once",
    "asgi-idempotency-header",
)


class Scenario(NamedTuple):
    """A line of the READMEs, and where its figures stand in results.md."""

    section: str
    column: str
    titles: Mapping[str, str]


SCENARIOS = (
    Scenario(
        "Redis, async",
        "first, 128 tasks [/s]",
        {"en": "Redis, 128 asyncio tasks", "zh": "Redis，128 个 asyncio 任务"},
    ),
    Scenario(
        "PostgreSQL with fsync, async",
        "first, 128 tasks [/s]",
        {"en": "PostgreSQL, 128 asyncio tasks", "zh": "PostgreSQL，128 个 asyncio 任务"},
    ),
    Scenario(
        "Redis, threads",
        "first, 1 caller [/s]",
        {"en": "Redis, one thread", "zh": "Redis，单线程"},
    ),
    Scenario(
        "PostgreSQL with fsync, threads",
        "first, 1 caller [/s]",
        {"en": "PostgreSQL, one thread", "zh": "PostgreSQL，单线程"},
    ),
    Scenario(
        "HTTP on Redis: fastapi",
        "first, fastapi, 32 connections [/s]",
        {"en": "FastAPI on Redis, 32 connections", "zh": "FastAPI + Redis，32 个连接"},
    ),
)

OTHERS = ("idemkit", "Powertools", "DBOS", "celery-once", "asgi-idempotency-header")
HEADS = {"en": ("", "semel", "by hand", *OTHERS), "zh": ("", "semel", "手写", *OTHERS)}
REMARKS = {
    "en": {"redis-py": " (lock)", "by hand": " (SQL)", "celery-once": " (stores no result)"},
    "zh": {"redis-py": "（锁）", "by hand": "（SQL）", "celery-once": "（不保存结果）"},
}
AHEAD = {
    "en": "semel is ahead in {ahead} of the {all} scenarios that we measure. "
    "[The report](benchmarks/results.md) names the other {behind}.",
    "zh": "在我们测量的 {all} 个场景中，semel 在 {ahead} 个场景中领先，"
    "其余 {behind} 个在[报告](benchmarks/results.md)中列明。",
}
READMES = {"en": HERE.parent / "README.md", "zh": HERE.parent / "README.zh.md"}


def figures(results: str, section: str, column: str) -> dict[str, float]:
    """Return what each contender of a section has in a column of its tables."""
    text = results.partition(f"\n### {section}\n")[2].partition("\n### ")[0]
    found: dict[str, float] = {}
    head: list[str] = []
    for line in filter(lambda line: line.startswith("|"), text.splitlines()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not cells[0]:
            head = cells
        elif column in head and (number := re.match(r"\d[\d,.]*", cells[head.index(column)])):
            found[cells[0]] = float(number[0].replace(",", ""))
    return found


def block(results: str, language: str) -> str:
    """Return what belongs between the marks of the README in this language."""
    lines = [
        "| " + " | ".join(HEADS[language]) + " |",
        "|" + "---|" * len(HEADS[language]),
        *(_line(results, scenario, language) for scenario in SCENARIOS),
    ]
    ahead, every = map(int, AHEAD_THERE.findall(results)[0])
    counts = {"ahead": ahead, "all": every, "behind": every - ahead}
    return "\n".join([*lines, "", AHEAD[language].format(**counts), ""])


def _line(results: str, scenario: Scenario, language: str) -> str:
    measured = figures(results, scenario.section, scenario.column)
    shown = [
        next(((name, rate) for name, rate in measured.items() if name.startswith(who)), None)
        for who in CONTENDERS
    ]
    best = max(rate for _, rate in filter(None, shown))
    cells = []
    for entry in shown:
        if entry is None:
            cells.append("–")
            continue
        name, rate = entry
        text = f"{rounded(rate):,}"
        remark = next((r for who, r in REMARKS[language].items() if name.startswith(who)), "")
        cells.append((f"**{text}**" if rate == best else text) + remark)
    return " | ".join([f"| {scenario.titles[language]}", *cells]) + " |"


def rounded(rate: float) -> int:
    """Return the rate as people read it: two digits below 1,000, hundreds above."""
    return int(round(rate, -1 if rate < 1000 else -2))


def updated(text: str, results: str, language: str) -> str:
    """Return a README with the figures of these results between its marks."""
    return MARKED.sub(lambda marks: marks[1] + block(results, language) + marks[2], text)


def update() -> None:
    """Write the figures into each README."""
    results = RESULTS.read_text(encoding="utf-8")
    for language, readme in READMES.items():
        text = readme.read_text(encoding="utf-8")
        readme.write_text(updated(text, results, language), encoding="utf-8")


if __name__ == "__main__":
    update()
