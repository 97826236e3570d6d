"""The options of a middleware: those of every door, and which paths it takes."""

from __future__ import annotations

from collections.abc import Sequence

from semel.http.options import DoorOptions, PathPattern, Route


class MiddlewareOptions(DoorOptions, total=False):
    """Options of every door, and which paths it takes."""

    include: Sequence[PathPattern] | None
    exclude: Sequence[PathPattern]
    routes: Sequence[Route]
