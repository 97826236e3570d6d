"""The app, as Django finds it."""

from __future__ import annotations

from django.apps import AppConfig


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    """`manage.py migrate semel` makes the table of records."""

    name = "semel.contrib.django"
    label = "semel"
    verbose_name = "semel: idempotency records"

    def ready(self) -> None:
        """Register the check of `settings.SEMEL`."""
        from semel.contrib.django import checks  # noqa: F401, PLC0415 - it registers itself
