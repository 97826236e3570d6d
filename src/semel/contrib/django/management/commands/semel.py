"""`manage.py semel ...`: the command `semel` on the store of the project's settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand

from semel.adapters.django.settings import configured
from semel.cli import USAGE, main
from semel.errors import ConfigError


class Command(BaseCommand):  # type: ignore[misc]  # Django ships no types
    """Hands its words to `semel`, which has a parser of its own."""

    help = "Look after the idempotency records of settings.SEMEL: semel stuck, show, resolve, ..."
    requires_system_checks = ()

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Run `manage.py semel ...`, and end with the exit code of `semel`."""
        sys.exit(run(argv[2:]))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Answer `manage.py help semel`."""
        del prog_name, subcommand  # `semel` has a usage of its own
        run(["--help"])

    def add_arguments(self, parser: Any) -> None:
        """Take words as they are, for `call_command`."""
        parser.add_argument("words", nargs="*")

    def handle(self, *_: Any, words: Sequence[str], **__: Any) -> None:
        """Run `call_command("semel", "stuck")`; a failure exits as the command does."""
        code = run(words)
        if code:
            sys.exit(code)


def run(words: Sequence[str]) -> int:
    """Run `semel` on the store of `settings.SEMEL`; an option that is typed wins."""
    try:
        chosen = configured()
    except ConfigError as error:
        sys.stderr.write(f"semel: {error}\n")
        return USAGE
    engine = dict(chosen.engine)
    given = {"--url": chosen.url, "--prefix": engine.pop("prefix", None)}
    known = [word for option, value in given.items() if value for word in (option, str(value))]
    return main([*known, *words], engine=engine)
