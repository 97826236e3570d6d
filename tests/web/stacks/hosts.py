"""One worker serves every profile on every store: each is a host with an application of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from semel import AsyncIdempotency, Idempotency
from web.handlers import Business, Folder
from web.profiles import ALL

Engine = Idempotency | AsyncIdempotency
MakeApplication = Callable[[Business, Any, Mapping[str, Any]], Any]


class Hosts:
    """Gives the application of a host (`profile.store`), made when it is first asked for."""

    def __init__(
        self, folder: Folder, make_engine: Callable[[str], Engine], make: MakeApplication
    ) -> None:
        self._folder, self._make_engine, self._make = folder, make_engine, make
        self._business = Business(folder)
        self._applications: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self._lock = threading.Lock()

    def application(self, host: str) -> Any:
        with self._lock:
            if host not in self._applications:
                profile, _, store = host.partition(".")
                if store not in self.engines:
                    self.engines[store] = self._make_engine(self._folder.store(store))
                engine = self.engines[store]
                self._applications[host] = self._make(self._business, engine, ALL[profile])
            return self._applications[host]
