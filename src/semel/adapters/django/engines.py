"""The engines that the settings ask for: one for all threads, and one for each event loop.

They are made when they are first needed, and made anew after a change of the settings in a test.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, Final

from django.core.signals import setting_changed

from semel.adapters.django.doors import AsyncDjangoIntegration, DjangoIntegration
from semel.adapters.django.settings import SETTING, configured
from semel.aio import AsyncIdempotency
from semel.sync import Idempotency


class Engines:
    """Gives the integrations of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._integration: DjangoIntegration | None = None
        self._integrations: dict[asyncio.AbstractEventLoop, AsyncDjangoIntegration] = {}

    def integration(self) -> DjangoIntegration:
        """The integration for threads."""
        with self._lock:
            if self._integration is None:
                chosen = configured()
                self._integration = DjangoIntegration(
                    Idempotency(chosen.url, **chosen.engine), chosen.options
                )
            return self._integration

    def async_integration(self) -> AsyncDjangoIntegration:
        """The integration of the event loop that runs here."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._integrations:
                self._integrations = {
                    other: integration
                    for other, integration in self._integrations.items()
                    if not other.is_closed()
                }
                chosen = configured()
                engine = AsyncIdempotency(chosen.url, **chosen.engine)
                self._integrations[loop] = AsyncDjangoIntegration(engine, chosen.options)
            return self._integrations[loop]

    def close(self) -> None:
        """Close the engine for threads."""
        with self._lock:
            integration, self._integration = self._integration, None
        if integration is not None:
            integration.engine.close()

    async def aclose(self) -> None:
        """Close the engine of the event loop that runs here."""
        with self._lock:
            integration = self._integrations.pop(asyncio.get_running_loop(), None)
        if integration is not None:
            await integration.engine.close()

    def forget(self) -> None:
        """Make everything anew; an engine of an event loop can only be closed on it."""
        self.close()
        with self._lock:
            self._integrations.clear()

    def after_fork_in_child(self) -> None:
        """Free the lock, which a thread of the parent may hold; loops stay with the parent."""
        self._lock = threading.RLock()
        self._integrations.clear()


ENGINES: Final = Engines()
close = ENGINES.close
aclose = ENGINES.aclose

if hasattr(os, "register_at_fork"):  # pragma: no branch - Windows has no fork
    os.register_at_fork(after_in_child=ENGINES.after_fork_in_child)


def _changed(*, setting: str, **_: Any) -> None:
    if setting == SETTING:
        ENGINES.forget()


setting_changed.connect(_changed)
