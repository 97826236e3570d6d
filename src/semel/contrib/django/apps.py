"""The app, as Django finds it."""

from __future__ import annotations

from django.apps import AppConfig


class SemelConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    """`manage.py migrate semel` makes the table of records."""

    name = "semel.contrib.django"
    label = "semel"
    verbose_name = "semel: idempotency records"
