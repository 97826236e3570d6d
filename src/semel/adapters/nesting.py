"""Doors within doors: the outermost one protects a request, those further inside let it pass.

A second one would find the key taken by the first, and refuse what it was to protect.
"""

from __future__ import annotations

from typing import Final

PROTECTED: Final = "semel.protected"
"""Is in the environ, or in the scope, of a request that a door protects."""
