"""Pages that are held to their word: what they say is what was promised, and can be run again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from docs.test_examples import ROOT, blocks, script

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
    assert GUARANTEES in (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_the_guards_can_be_tried_twice_in_one_folder(tmp_path):
    page = (ROOT / "docs" / "howto" / "guards.md").read_text(encoding="utf-8")
    example = tmp_path / "page_guards.py"
    example.write_text(script(blocks(page)), encoding="utf-8")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", example.name],
            cwd=tmp_path,
            env={**os.environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["mysql.md", "postgresql.md"])
def test_an_example_closes_the_stores_that_it_opens(page):
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    opened = text.count("\nstore = ")
    assert opened >= 2
    assert text.count("\nstore.close()") == opened
