"""A fork that Python does not see, as uWSGI makes it: by C code, which calls none of the hooks."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_fork = ctypes.PyDLL(None).fork if hasattr(os, "fork") else None


def unseen_fork() -> int:
    """Fork by the C library, once every other thread is asleep; return what `os.fork` would.

    CPython itself does not survive such a fork while another thread waits for its global lock.
    """
    while not all(_asleep(thread) for thread in threading.enumerate()):
        time.sleep(0.01)
    return _fork()


def in_an_unseen_fork(work: Callable[[], object]) -> str:
    """Run `work` in a child that Python does not see forked; return its answer, as text."""
    read, write = os.pipe()
    child = unseen_fork()
    if child == 0:
        answer = "nothing"
        try:
            answer = str(work())
        except BaseException as error:
            answer = repr(error)
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


def _asleep(thread: threading.Thread) -> bool:
    """Whether a thread has not run at all for a moment; the calling one counts as asleep."""
    if thread is threading.current_thread() or thread.native_id is None:
        return True
    before = _switches(thread.native_id)
    time.sleep(0.03)
    return _switches(thread.native_id) == before


def _switches(native_id: int) -> str:
    try:
        status = Path(f"/proc/self/task/{native_id}/status").read_text(encoding="ascii")
    except OSError:  # it has ended
        return ""
    return status[status.find("voluntary_ctxt_switches") :]
