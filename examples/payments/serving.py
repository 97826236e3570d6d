"""Where an example keeps its files, and how it is started from a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """The book of payments, and the store of semel's records."""

    book: Path
    store: str


def run(serve: Callable[[Place, int], object]) -> None:
    """Serve on a loopback port until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--store", help="URL of the store; SQLite in the folder if left out")
    given = parser.parse_args()
    store = given.store or f"sqlite:///{given.folder / 'semel.db'}"
    serve(Place(given.folder / "payments.db", store), given.port)
