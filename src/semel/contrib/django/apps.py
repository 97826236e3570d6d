"""The app, as Django finds it, and what it adds to `manage.py check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.db import connections
from django.utils.module_loading import import_string

from semel.adapters._sync.integration import Integration
from semel.adapters.django.atomic import shares_file
from semel.adapters.django.middleware import IdempotencyMiddleware
from semel.adapters.django.settings import SETTING, read
from semel.errors import ConfigError
from semel.sync import Idempotency


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    """`manage.py migrate semel` makes the table of records."""

    name = "semel.contrib.django"
    label = "semel"
    verbose_name = "semel: idempotency records"


@checks.register("semel")  # type: ignore[untyped-decorator]  # Django ships no types
def check_settings(**_: Any) -> Sequence[checks.CheckMessage]:
    """Make an integration as the settings say, and report everything that does not work."""
    if not hasattr(settings, SETTING):
        return []
    try:
        chosen, mistakes = read()
    except ConfigError as error:
        return [checks.Error(str(error), id="semel.E001")]
    max_body, atomic = 0, []
    try:
        with Idempotency(chosen.url, **chosen.engine) as engine:
            max_body = Integration(engine, chosen.options).rules_for(chosen.view_options).max_body
            atomic = _atomic_requests(engine)
    except ConfigError as error:
        mistakes.append(str(error))
    except TypeError as error:
        mistakes.append(f"ENGINE: {error}")
    if mistakes:
        return [
            checks.Error(f"settings.{SETTING}: {mistake}", id="semel.E001") for mistake in mistakes
        ]
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    if limit is not None and max_body > limit:
        too_large = checks.Warning(
            f"settings.{SETTING}: MAX_BODY is above DATA_UPLOAD_MAX_MEMORY_SIZE, which counts",
            hint="A body is read whole to be compared: raise both, or lower MAX_BODY.",
            id="semel.W001",
        )
        return [too_large, *atomic]
    return atomic


def _atomic_requests(engine: Idempotency) -> list[checks.CheckMessage]:
    """Say what ATOMIC_REQUESTS means for views with `@idempotent` and without `atomic=`."""
    messages: list[checks.CheckMessage] = []
    databases: Any = connections.settings
    for alias, options in databases.items():
        if not options["ATOMIC_REQUESTS"]:
            continue
        if shares_file(engine, connections[alias]):
            message = checks.Warning(
                f"ATOMIC_REQUESTS of {alias!r} is on, and settings.{SETTING} keeps the records in "
                "the same SQLite file: views with @idempotent and without atomic= are rejected",
                hint=f"Use @idempotent(atomic={alias!r}); the middleware is not affected.",
                id="semel.W003",
            )
        else:
            message = checks.Info(
                f"ATOMIC_REQUESTS of {alias!r} is on: the record of a view with @idempotent and "
                "without atomic= is saved after the commit",
                hint="A process that dies between the two leaves the effect without its record.",
                id="semel.I001",
            )
        messages.append(message)
    return messages


@checks.register("semel")  # type: ignore[untyped-decorator]  # Django ships no types
def check_middleware(**_: Any) -> Sequence[checks.CheckMessage]:
    """Warn of middlewares whose checks a replay would not meet, as Django asks them after ours."""
    layers = [(name, _imported(name)) for name in settings.MIDDLEWARE]
    ours = [place for place, (_, layer) in enumerate(layers) if _is_ours(layer)]
    if not ours:
        return []
    return [
        checks.Warning(
            f"MIDDLEWARE: {name} has a process_view, and stands after IdempotencyMiddleware",
            hint="A replay answers before it is asked: move IdempotencyMiddleware to the end.",
            id="semel.W002",
        )
        for name, layer in layers[ours[0] + 1 :]
        if hasattr(layer, "process_view") and not _is_ours(layer)
    ]


def _imported(name: str) -> Any:
    try:
        return import_string(name)
    except (ImportError, ValueError):  # Django reports it when it loads the middleware
        return None


def _is_ours(layer: Any) -> bool:
    return isinstance(layer, type) and issubclass(layer, IdempotencyMiddleware)
