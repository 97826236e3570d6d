"""The page of the command line is generated from the help, and its examples are understood."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex

import pytest

from semel.cli import parser

COMMON = {"--help", "--version", "--url", "--config", "--prefix"}
EXAMPLE = re.compile(r"^\$ semel ((?:.*\\\n)*.+)$", re.MULTILINE)


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


@pytest.fixture(scope="module")
def generator(project):
    return runpy.run_path(str(project / "scripts" / "cli_reference.py"))


def test_the_page_is_generated_from_the_help(page, generator):
    assert generator["render"](page) == page


@pytest.mark.parametrize("name", commands())
def test_the_page_has_every_command_and_option_in_a_block_of_its_own(page, name):
    (block,) = re.findall(
        rf"^## semel {name}\n\n<!-- generated: {name} -->(.*?)<!-- end: {name} -->",
        page,
        re.MULTILINE | re.DOTALL,
    )
    told = set(re.findall(r"^\| `(--[\w-]+)", block, re.MULTILINE))
    assert told - COMMON == options(commands()[name]) - COMMON


def test_the_page_has_the_commands_in_the_order_of_the_help_and_no_other(page):
    assert re.findall(r"^## semel ([\w-]+)$", page, re.MULTILINE) == list(commands())


def test_a_new_command_gets_a_section_and_an_old_one_loses_its_own(page, generator):
    without = re.sub(r"## semel find\n.*?<!-- end: find -->\n", "", page, flags=re.DOTALL)
    stale = "## semel old\n\n<!-- generated: old -->\n\nstale\n\n<!-- end: old -->\n\n"
    written = generator["render"](without.replace("## semel show", f"{stale}## semel show"))
    assert re.findall(r"^## semel ([\w-]+)$", written, re.MULTILINE) == list(commands())
    assert "stale" not in written


@pytest.mark.parametrize("made", [parser(), *commands().values()], ids=lambda made: made.prog)
def test_every_argument_is_described_in_a_lowercase_phrase(made):
    shown = [action for action in made._actions if action.help != argparse.SUPPRESS]
    named = [action for action in shown if not isinstance(action, argparse._SubParsersAction)]
    for text in [made.description, *(action.help for action in named)]:
        assert text
        assert not text.endswith("."), text
        assert text[0].islower() or text.split()[0].isupper(), text
    for action in named:
        takes_value = action.option_strings and action.nargs != 0
        assert not takes_value or action.metavar, action.option_strings


def test_every_example_of_the_pages_is_understood(project):
    pages = [project / "README.md", *(project / "docs").rglob("*.md")]
    examples = [line for page in pages for line in EXAMPLE.findall(page.read_text("utf-8"))]
    assert len(examples) >= 8
    for line in (re.split(" (?:[|]|>>?) ", each.replace("\\\n", " "))[0] for each in examples):
        assert callable(parser().parse_args(shlex.split(line, comments=True)).run), line
