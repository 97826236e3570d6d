"""The options of a middleware: those of every door, and which paths it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from semel.http.options import DoorOptions, PathPattern, Route


class PathOptions(TypedDict, total=False):
    """Which paths a middleware takes, and other options for some of them."""

    include: Sequence[PathPattern] | None
    exclude: Sequence[PathPattern]
    routes: Sequence[Route]


class MiddlewareOptions(DoorOptions, PathOptions, total=False):
    """Options of every door, and which paths it takes."""
