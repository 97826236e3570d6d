"""The demo as a newcomer runs it, and the proof that its check can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

ROW = re.compile(r"^  (?P<name>[a-z ]+?) +(?P<number>[\d,]+)  \S", re.MULTILINE)

SMALL = ("--requests", "120", "--seed", "7")


def run(project, temporary, *options):
    """Run the demo where a warning is an error; its processes inherit that."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.demo", *options],
        cwd=project,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def rows(output):
    """The numbers of the table, by name."""
    return {row["name"]: int(row["number"].replace(",", "")) for row in ROW.finditer(output)}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """Where the demo finds room for its files."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(project, temporary):
    """A small demo, run once."""
    return run(project, temporary, *SMALL)


def test_every_payment_is_charged_once_whatever_the_clients_and_the_workers_do(shown):
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stderr == ""
    assert "OK: each of 36 payments was charged exactly once." in shown.stdout
    assert rows(shown.stdout)["charges"] == 36


def test_everything_that_was_promised_happens(shown):
    table = rows(shown.stdout)
    assert table["requests"] == 120 + table["retries"]
    assert table["replays"] >= table["waits"] >= 1
    assert table["mismatches"] >= 1
    assert table["retries"] > 2 * table["killed workers"], "the network failed too"
    assert table["takeovers"] >= table["killed workers"] == 2


def test_every_request_has_one_end(shown):
    table = rows(shown.stdout)
    failed = table["retries"] - 2 * table["killed workers"]  # a dead worker's client asks twice
    ends = ("charges", "replays", "mismatches", "killed workers")
    assert table["requests"] == failed + sum(table[end] for end in ends)


def test_the_killed_workers_keys_are_taken_over_by_the_second_attempt(shown):
    for moment in ("before", "after"):
        told = rf"SIGKILL {moment} its charge; attempt 2 took over"
        assert re.search(told, shown.stdout)


def test_a_log_gets_a_few_lines_and_no_control_characters(shown):
    assert "\r" not in shown.stdout
    assert "\033" not in shown.stdout
    assert shown.stdout.count("storm of requests") <= 4


def test_nothing_is_left_behind(shown, temporary):
    assert shown.returncode == 0
    assert list(temporary.iterdir()) == []


def test_the_check_names_the_keys_that_were_charged_twice_and_the_books_can_be_kept(
    project, tmp_path
):
    sabotaged = run(project, tmp_path, *SMALL, "--sabotage", "--keep")
    assert sabotaged.returncode == 1, sabotaged.stdout + sabotaged.stderr
    assert re.search(r"CHARGED \d TIMES pay-\d{4}: ", sabotaged.stdout)
    assert rows(sabotaged.stdout)["charges"] > 36
    assert "OK" not in sabotaged.stdout
    [folder] = tmp_path.iterdir()
    assert str(folder) in sabotaged.stdout
    assert {"semel.db", "ledger.db"} <= {path.name for path in folder.iterdir()}


def test_too_few_requests_for_all_kinds_of_trouble_are_refused(project, tmp_path):
    refused = run(project, tmp_path, "--requests", "10")
    assert refused.returncode == 2
    assert "at least 40" in refused.stderr
