"""Write docs/reference/cli.md again, from the commands and options that the parser knows.

`make reference` runs it. What stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->` is
written; the prose around it is kept. NAME is a command, or `semel` for what goes before a command.
A new command gets its section at the place that the order of the parser says. With `--check`,
nothing is written, and the exit code is 1 if the page differs.
"""

# ruff: noqa: SLF001  argparse has no public way to look at a parser

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from semel.cli import parser

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
WHOLE = "semel"
_HELP = "-h"


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of `semel --help`."""
    return dict(_subparsers().choices)


def _subparsers() -> argparse._SubParsersAction[argparse.ArgumentParser]:
    (found,) = (
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return found


def render(page: str) -> str:
    """Return the page with each generated block as the parser would have it today."""
    blocks = {WHOLE: _whole()} | {name: _block(made) for name, made in commands().items()}
    for name in re.findall(r"^<!-- generated: (\S+) -->$", page, re.MULTILINE):
        if name not in blocks:
            page = re.sub(rf"## semel {name}\n\n{_pattern(name)}\n*", "", page, flags=re.DOTALL)
    after = WHOLE
    for name, block in blocks.items():
        written = f"<!-- generated: {name} -->\n\n{block}\n\n<!-- end: {name} -->"
        if f"<!-- generated: {name} -->" not in page:
            end = f"<!-- end: {after} -->"
            page = page.replace(end, f"{end}\n\n## semel {name}\n\n{written}")
        page = re.sub(_pattern(name), written.replace("\\", r"\\"), page, flags=re.DOTALL)
        after = name
    return page


def _pattern(name: str) -> str:
    return rf"<!-- generated: {name} -->.*?<!-- end: {name} -->"


def _whole() -> str:
    """Show what goes before a command, and list the commands."""
    lines = [f"| [`semel {name}`](#semel-{name}) | {_help(name)} |" for name in commands()]
    rows = [_row(action) for action in parser()._actions if action.option_strings]
    return "\n".join(
        [
            "```text",
            "semel [--url URL] [--prefix PREFIX] [--config FILE] COMMAND ...",
            "```",
            "",
            *_table("option before the command", filter(None, rows)),
            "",
            "| command | what it does |",
            "|---|---|",
            *lines,
        ]
    )


def _help(name: str) -> str:
    (found,) = (each for each in _subparsers()._choices_actions if each.dest == name)
    return str(found.help)


def _block(made: argparse.ArgumentParser) -> str:
    """Show the usage of a command, what it does, and its arguments and options."""
    usage = ["semel", made.prog.rpartition(" ")[2]]
    usage += [
        f"({' | '.join(map(_form, group._group_actions))})"
        for group in made._mutually_exclusive_groups
        if group.required
    ]
    usage += [
        _form(action) for action in made._actions if action.option_strings and action.required
    ]
    rows = list(filter(None, map(_row, made._actions)))
    if any(row.startswith("| `-") for row in rows):
        usage.append("[OPTIONS]")
    for action in made._get_positional_actions():
        usage.append(f"[{_form(action)}]" if action.nargs == "?" else _form(action))
    text = f"{str(made.description)[0].upper()}{str(made.description)[1:]}."
    lines = ["```text", " ".join(usage), "```", "", text]
    if rows:
        lines += ["", *_table("argument or option", rows)]
    return "\n".join(lines)


def _table(head: str, rows: Iterable[str]) -> list[str]:
    return [f"| {head} | what it does |", "|---|---|", *rows]


def _row(action: argparse.Action) -> str | None:
    if action.help == argparse.SUPPRESS or _HELP in action.option_strings:
        return None
    return f"| `{_form(action)}` | {action.help} |"


def _form(action: argparse.Action) -> str:
    """Write an argument as a person types it."""
    value = action.metavar or "{" + ",".join(action.choices or ()) + "}"
    if not action.option_strings:
        return str(value)
    (option,) = (text for text in action.option_strings if text.startswith("--"))
    return option if action.nargs == 0 else f"{option} {value}"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    before = PAGE.read_text(encoding="utf-8")
    after = render(before)
    if "--check" in arguments:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
