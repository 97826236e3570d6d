"""`manage.py check` tells of settings that the doors would refuse, before a request meets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core import checks

from semel.adapters.django.settings import SETTING, configured
from semel.adapters.door import Door
from semel.errors import ConfigError
from semel.sync import Idempotency


@checks.register("semel")  # type: ignore[untyped-decorator]  # Django ships no types
def check_settings(**_: Any) -> Sequence[checks.CheckMessage]:
    """Make a door as the settings say, and look whether it works out."""
    if not hasattr(settings, SETTING):
        return []
    try:
        chosen = configured()
        with Idempotency(chosen.url, **chosen.engine) as engine:
            book = Door(engine, chosen.options).book(chosen.view_options)
    except (ConfigError, TypeError) as error:
        return [checks.Error(f"settings.{SETTING}: {error}", id="semel.E001")]
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    if limit is not None and book.max_body > limit:
        return [
            checks.Warning(
                f"settings.{SETTING}: MAX_BODY is above DATA_UPLOAD_MAX_MEMORY_SIZE, which counts",
                hint="A body is read whole to be compared: raise both, or lower MAX_BODY.",
                id="semel.W001",
            )
        ]
    return []
