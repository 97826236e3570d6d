"""The page of the command line tells what the parser knows, and its examples are understood."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from semel.cli import parser

COMMON = {"--help", "--version", "--url", "--config", "--prefix"}
EXAMPLE = re.compile(r"^\$ semel (.+)$", re.MULTILINE)


def commands():
    (found,) = (
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return found.choices


def options(command):
    return {
        text
        for action in command._actions
        for text in action.option_strings
        if text.startswith("--")
    }


@pytest.fixture(scope="module")
def page(project):
    return (project / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def test_the_page_has_every_command_and_no_other(page):
    assert set(re.findall(r"^\| `semel ([\w-]+)", page, re.MULTILINE)) == set(commands())


@pytest.mark.parametrize("name", commands())
def test_the_page_has_every_option_and_no_other(page, name):
    (row,) = re.findall(rf"^\| `semel {name}\b.*$", page, re.MULTILINE)
    told = set(re.findall(r"`(--[\w-]+)", row))
    assert told - COMMON == options(commands()[name]) - COMMON


def test_every_example_of_the_pages_is_understood(project):
    pages = [project / "README.md", *(project / "docs").rglob("*.md")]
    examples = [line for page in pages for line in EXAMPLE.findall(page.read_text("utf-8"))]
    assert len(examples) >= 8
    for line in (re.split(" [|>] ", each)[0] for each in examples):
        assert callable(parser().parse_args(shlex.split(line, comments=True)).run), line
