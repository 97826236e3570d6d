"""Workers of Celery in processes of their own, and what a test asks of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery, signals

PATIENCE = 60.0

SENT: list[dict[str, Any]] = []
"""All messages that this process has sent."""


@signals.before_task_publish.connect  # once: Celery 5.3 does not notice later ones
def note(**message: Any) -> None:
    SENT.append(message)


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what())
        time.sleep(0.02)


class Shop:
    """A folder, a broker, and the workers of `celery_shop`, started when they are first needed."""

    def __init__(
        self, folder: Path, *, broker: str, backend: str, store: str, pool: str, **settings: str
    ) -> None:
        self.folder = folder
        self.pool = pool
        self._settings = {
            "SHOP_FOLDER": str(folder),
            "SHOP_BROKER": broker,
            "SHOP_BACKEND": backend,
            "SHOP_STORE": store,
            **settings,
        }
        self._log = folder / "log"
        self._log.touch()
        self.client = Celery("client", broker=broker, backend=backend, set_as_current=False)
        self.client.conf.accept_content = ["json", "pickle"]
        self.worker: subprocess.Popen[bytes] | None = None

    # --- the worker ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start a worker, unless one runs."""
        if self.worker is not None and self.worker.poll() is None:
            return
        begun = self.log.count(" ready.")
        command = ["-A", "adapters.celery_shop", "worker", "-P", self.pool, "-c", "4", "-l", "INFO"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        tests = Path(__file__).resolve().parents[1]
        path = os.pathsep.join([str(tests), str(tests.parent / "src"), *sys.path])
        with self._log.open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "celery", *command, *quiet],
                env={**os.environ, **self._settings, "PYTHONPATH": path, "C_FORCE_ROOT": "1"},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        worker = self.worker
        self.wait_for(lambda: self.log.count(" ready.") > begun or worker.poll() is not None)
        assert worker.poll() is None, self.log[-6000:]

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.worker is not None
        self.worker.send_signal(number)

    def stopped(self) -> int:
        """Wait for the end of the worker, and return its exit code."""
        assert self.worker is not None
        return self.worker.wait(PATIENCE)

    def close(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.signal()
            try:
                self.worker.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.worker.kill()
                self.worker.wait()
        if hasattr(self.client.backend, "client"):
            self.client.backend.client.close()
        self.client.close()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a worker does; if it does not, its log is in the error."""
        wait_until(condition, lambda: self.log[-6000:])

    def wait_for_log(self, *words: str, times: int = 1) -> None:
        """Wait until so many lines of the log have all these words."""
        self.wait_for(lambda: self.lines(*words) >= times)

    def lines(self, *words: str) -> int:
        return sum(all(word in line for word in words) for line in self.log.splitlines())

    # --- messages ------------------------------------------------------------------------------

    def send(self, task: str, *args: Any, key: str, **options: Any) -> Any:
        """Send a message with this id."""
        return self.client.send_task(task, args, task_id=key, **options)

    @contextmanager
    def recorded(self) -> Iterator[list[dict[str, Any]]]:
        """Give out the messages that are sent here, so that a broker can deliver them twice."""
        before, sent = len(SENT), []
        yield sent
        sent += SENT[before:]

    def duplicate(self, message: dict[str, Any]) -> None:
        """Send a message again as it was."""
        with self.client.amqp.producer_pool.acquire(block=True) as producer:
            producer.publish(
                message["body"],
                exchange=message["exchange"],
                routing_key=message["routing_key"],
                headers=message["headers"],
                serializer="json",
                **message["properties"],
            )

    # --- what they did -------------------------------------------------------------------------

    @property
    def effects(self) -> Counter[str]:
        path = self.folder / "effects"
        return Counter(path.read_text().splitlines() if path.exists() else ())

    def effects_of(self, task: str, order: object) -> list[str]:
        return [each for each in self.effects.elements() if each.startswith(f"{task} {order}")]

    def wait_for_effect(self, text: str) -> None:
        self.wait_for(lambda: text in self.effects)

    def open(self, order: int) -> None:
        """Let the task `gated` go on."""
        (self.folder / f"go-{order}").touch()
