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

GUARANTEES = """\
| you use | at most one stored outcome | at most one effect |
|---|---|---|
| transactional mode (record and business rows in one commit) | yes | yes, for effects in that database |
| lease + takeover | yes | no: a crash after the effect repeats it, unless downstream dedups on `attempt.derive(...)` |
| lease + hold + resolver | yes | yes, if the resolver says "not done" only with proof that it is not done and no longer can be |
| Redis alone, asynchronous failover | no (stated openly) | no |
| tiered | as SQL | as SQL |
"""


def test_the_guarantees_are_stated_word_for_word():
    assert GUARANTEES in (ROOT / "docs" / "concepts" / "guarantees.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/protect/{page}.md" for page in [*INTEGRATIONS, "sessions"])]
)
def test_the_first_example_of_an_integration_says_whose_key_it_is_and_holds_none(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    first = next(block.code for block in blocks(text) if INTEGRATION.search(block.code))
    assert re.search(r"\btenant\b", first, re.IGNORECASE), first
    assert "payment()" not in first


@pytest.mark.parametrize(
    ("first", "folder"),
    [("README.md", "protect"), ("docs/index.md", "protect"), ("docs/reference/index.md", "reference")],
)
def test_every_page_is_linked_from_the_first_page(first, folder):
    text = (ROOT / first).read_text(encoding="utf-8")
    linked = {link.rpartition("/")[2] for link in re.findall(r"\]\(([^)#]+\.md)", text)}
    pages = {page.name for page in (ROOT / "docs" / folder).glob("*.md")} - {"index.md"}
    assert pages - linked == set()


@pytest.mark.parametrize("page", ["http", "fastapi", "grpc"])
def test_a_page_that_names_the_policy_of_payments_says_what_it_costs(page):
    text = (ROOT / "docs" / "protect" / f"{page}.md").read_text(encoding="utf-8")
    assert "Policy.payment()" in text
    assert "](http.md#payments)" in text or "### Payments" in text


@pytest.mark.parametrize("page", ["mysql.md", "postgresql.md"])
def test_an_example_closes_the_stores_that_it_opens(page):
    text = (ROOT / "docs" / "stores" / page).read_text(encoding="utf-8")
    opened = text.count("\nstore = ")
    assert opened >= 2
    assert text.count("\nstore.close()") == opened
