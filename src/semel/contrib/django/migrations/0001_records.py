"""Makes the table of records."""

from __future__ import annotations

from django.db import migrations

from semel.contrib.django.migrations import RecordsVersion


class Migration(migrations.Migration):  # type: ignore[misc]  # Django ships no types
    """The first version."""

    initial = True
    dependencies: tuple[()] = ()
    operations = (RecordsVersion(1),)
