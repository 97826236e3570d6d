# Generated from aio.py by `make generate`: change that file instead.
"""The public import path of the engine for threads."""

from __future__ import annotations

from semel.engine._sync.facade import AttemptContext, Idempotency
from semel.engine._sync.marks import Marks
from semel.engine._sync.once import Once
from semel.engine._sync.once_per import OncePer

__all__ = ["AttemptContext", "Idempotency", "Marks", "Once", "OncePer"]
