"""Pages that are held to their word: what they say is what was promised, and can be run again."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from docs.test_examples import ROOT, blocks, script

INTEGRATION = re.compile(r"Idempotent\(|Idempotency(?:Middleware|Interceptor)")
"""The first of them on a page makes the integration, or names it in the settings."""

ONE_OUTCOME, ONE_EFFECT = "At most one stored outcome", "At most one effect"
GUARANTEES = {
    "One commit": {ONE_OUTCOME: "yes", ONE_EFFECT: "yes, for effects in that database"},
    "Run again": {
        ONE_OUTCOME: "yes",
        ONE_EFFECT: "no: a crash after the effect repeats it, unless the next system deduplicates "
        "on `attempt.derive(...)`",
    },
    "Hold": {
        ONE_OUTCOME: "yes",
        ONE_EFFECT: 'yes, if the resolver says "not done" only with proof that it isn\'t done and '
        "no longer can be",
    },
    "Redis alone": {ONE_OUTCOME: "no", ONE_EFFECT: "no"},
    "Redis in front of SQL": {ONE_OUTCOME: "as SQL", ONE_EFFECT: "as SQL"},
}
"""What is promised: the cells of the table by the bold words of its rows, and by its columns."""


def test_the_guarantees_are_stated_cell_by_cell():
    page = (ROOT / "docs" / "concepts" / "guarantees.md").read_text(encoding="utf-8")
    lines = page[page.index("| You use |") :].partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    stated = {
        re.match(r"\*\*(.+?)\*\*", row[0])[1]: dict(zip(head[1:], row[1:], strict=True))
        for row in rows
    }
    assert stated == GUARANTEES


INTEGRATIONS = ["asgi", "fastapi", "wsgi", "flask", "django", "grpc"]
REPEATABLE = ["guards", *INTEGRATIONS, "by-hand"]


def test_the_pages_can_be_tried_twice_in_one_folder(tmp_path):
    for page in REPEATABLE * 2:
        text = (ROOT / "docs" / "protect" / f"{page}.md").read_text(encoding="utf-8")
        example = tmp_path / f"page_{page}.py"  # a plain name could hide a package
        example.write_text(script(blocks(text)), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-W", "error", example.name],
            cwd=tmp_path,
            env={**os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{page}: {done.stderr}"


MONEY = re.compile(r"\b(pay|paid|payments?|charges?|charge_card|refund)\b", re.IGNORECASE)
ONE_COMMIT_OR_HOLD = re.compile(
    r"\b(session|atomic|transaction)=|\.transaction\(|Policy\.payment\(|abandoned=\"hold\""
)
CRASH = re.compile(r"\b(crash|crashes|died|dies|killed)\b")


def first_screen(page):
    """What a reader sees of a page before its first heading."""
    return (ROOT / page).read_text(encoding="utf-8").partition("\n## ")[0]


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/protect/{page}.md" for page in [*INTEGRATIONS, "sessions"])]
)
def test_the_first_screen_of_an_integration_is_safe(page):
    text = first_screen(page)
    code = "\n".join(block.code for block in blocks(text))
    assert INTEGRATION.search(code) or "@idempotent" in code
    assert re.search(r"\btenant\b", code, re.IGNORECASE), "it doesn't say whose key it is"
    assert not MONEY.search(code) or ONE_COMMIT_OR_HOLD.search(code), "a crash may pay twice"
    assert CRASH.search(text), "it doesn't say what a crash does"


@pytest.mark.parametrize("page", [*INTEGRATIONS, "sessions", "by-hand", "api-clients", "index"])
def test_a_page_says_what_to_install_and_what_a_crash_does(page):
    text = (ROOT / "docs" / "protect" / f"{page}.md").read_text(encoding="utf-8")
    assert re.search(r"^\$ pip install \"?semel\b", text, re.MULTILINE)
    assert page == "api-clients" or CRASH.search(text)


@pytest.mark.parametrize(
    ("first", "folder"),
    [("docs/protect/index.md", "protect"), ("docs/reference/index.md", "reference")],
)
def test_every_page_is_linked_from_the_first_page_of_its_part(first, folder):
    text = (ROOT / first).read_text(encoding="utf-8")
    linked = {link.rpartition("/")[2] for link in re.findall(r"\]\(([^)#]+\.md)", text)}
    pages = {page.name for page in (ROOT / "docs" / folder).glob("*.md")} - {"index.md"}
    assert pages - linked == set()


def test_the_readme_links_the_guide_of_every_integration():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    others = ["sessions", "celery", "rabbitmq", "queues", "schedules", "clients"]
    assert [n for n in [*INTEGRATIONS, *others] if f"](docs/protect/{n}.md)" not in readme] == []


@pytest.mark.parametrize("page", ["http", "asgi", "fastapi", "flask", "wsgi", "grpc"])
def test_a_page_that_names_the_policy_of_payments_says_what_it_costs(page):
    text = (ROOT / "docs" / "protect" / f"{page}.md").read_text(encoding="utf-8")
    assert "Policy.payment()" in text
    assert "](http.md#payments)" in text or "\n## Payments\n" in text


@pytest.mark.parametrize("page", ["index.md", "mysql.md"])
def test_an_example_closes_the_stores_that_it_opens(page):
    text = (ROOT / "docs" / "stores" / page).read_text(encoding="utf-8")
    opened = text.count("\nstore = ")
    assert opened >= 1
    assert text.count("\nstore.close()") == opened
