"""What is said when a package is missing: who needs it, and the command that installs it.

Every module that stands on an optional package imports it under `Needed`, so that all of them say
the same.
"""

from __future__ import annotations

from types import TracebackType


class Needed:
    """Names the extra if an import inside fails: `with Needed("semel[flask]", by=__name__): ...`.

    A package that an import misses is a `ModuleNotFoundError` still; where it is a setting that
    asks for it, the caller says `ConfigError`.
    """

    def __init__(
        self, install: str | None, *, by: str, error: type[Exception] = ModuleNotFoundError
    ) -> None:
        self._install = install
        self._by = by
        self._error = error

    def __enter__(self) -> None:
        """Begin to import."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # None: nothing optional is imported. And one of our own modules is never an extra.
        if self._install is None or not isinstance(error, ModuleNotFoundError):
            return
        missing = error.name or ""
        if missing.partition(".")[0] == "semel":
            return
        refusal = self._error(
            f"{self._by} needs the package {missing}: pip install '{self._install}'"
        )
        if isinstance(refusal, ImportError):
            refusal.name = missing  # as Python's own error has it
        raise refusal from error
