"""Where everything of one demo lives: a folder that is gone afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The folder, and what is in it."""

    folder: Path

    @property
    def store(self) -> str:
        """The URL of semel's store."""
        return f"sqlite:///{self.folder / 'semel.db'}"

    @property
    def ledger(self) -> Path:
        """The card network's ledger."""
        return self.folder / "ledger.db"

    @property
    def log(self) -> Path:
        """What semel's logger says in the workers."""
        return self.folder / "semel.log"


@contextlib.contextmanager
def new_place(*, keep: bool) -> Iterator[Place]:
    """Make the folder; with `keep` it stays, and is named at the end."""
    if keep:
        folder = tempfile.mkdtemp(prefix="semel-demo-")
        yield Place(Path(folder))
        print(f"\nKept for you to look at: {folder}")
    else:
        with tempfile.TemporaryDirectory(prefix="semel-demo-") as folder:
            yield Place(Path(folder))
