"""Workers as processes: forked from one that has imported everything, killed by their groups.

`ForkServer` is their parent: it forks a worker in a tenth of a second, where starting one takes a
second or two, and its processes end with it. Each has a process group of its own, so that a worker
of Celery is killed with its children.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from queues.ledger import PATIENCE, eventually

TESTS = Path(__file__).resolve().parents[1]


class Worker:
    """One worker, by its process id."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder

    @property
    def code(self) -> int | None:
        """How it ended: negative for a signal; None while it runs."""
        try:
            return int((self._folder / f"exit-{self.pid}").read_text() or "x")
        except (FileNotFoundError, ValueError):
            return None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM, os.kill)

    def kill(self) -> None:
        """End it at once, with its children, in the middle of whatever it does."""
        self._signal(signal.SIGKILL, os.killpg)
        self.ended()

    def ended(self) -> int:
        """Wait for its end, and tell how it ended."""
        eventually(lambda: self.code is not None, f"worker {self.pid} to end")
        code = self.code
        assert code is not None
        return code

    def _signal(self, number: signal.Signals, send: Callable[[int, int], None]) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)


class ForkServer:
    """The process that workers are forked from."""

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "queues.processes", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            cwd=TESTS,
            text=True,
        )

    def start(self, function: str, folder: Path, **orders: Any) -> Worker:
        """Start a worker: a process that calls the function ("module:name") with the orders."""
        line = {"function": function, "folder": str(folder), "orders": orders}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            return Worker(int(self._process.stdout.readline()), folder)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


@contextlib.contextmanager
def fork_server(*modules: str) -> Iterator[ForkServer]:
    started = ForkServer(*modules)
    try:
        yield started
    finally:
        started.close()


# --- the parent of the workers -------------------------------------------------------------------


def main(modules: list[str]) -> None:
    """Fork a worker for each line of input; kill those that are left at its end."""
    for module in modules:
        importlib.import_module(module)
    folders: dict[int, Path] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                folder = folders.pop(ended[0])
                with contextlib.suppress(FileNotFoundError):  # the test has gone before it
                    (folder / f"exit-{ended[0]}").write_text(str(code))

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        told = json.loads(line)
        # Blocked: a worker that ends at once is not looked for before it is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            _be_worker(told)
        os.setpgid(pid, pid)
        folders[pid] = Path(told["folder"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        print(pid, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in folders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _be_worker(told: dict[str, Any]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        folder = Path(told["folder"])
        log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for file, number in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(file, number)
        module, _, name = told["function"].partition(":")
        getattr(importlib.import_module(module), name)(folder, **told["orders"])
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
