"""The examples of `clients/README.md` run, twice each: the second run replays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel
from clients.programs import LANGUAGES, PATIENCE, ROOT, build, found, node
from server.conftest import RunningService

README = (ROOT / "clients" / "README.md").read_text("utf-8")
URL = "127.0.0.1:8600"


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("service")
    (rules,) = re.findall("```toml\n(.*?)```", README, re.DOTALL)
    folder.joinpath("semel.toml").write_text(rules)
    running = RunningService(folder, f"sqlite:///{folder / 'semel.db'}", (), {})
    yield running
    running.stop()


def javascript(example: str, folder: Path) -> list[str]:
    shutil.copy(ROOT / "clients" / "javascript" / "semel.mjs", folder)
    folder.joinpath("pay.mjs").write_text(example)
    return [node(), str(folder / "pay.mjs")]


def go(example: str, folder: Path) -> list[str]:
    shutil.copytree(ROOT / "clients" / "go", folder / "semel")
    folder.joinpath("main.go").write_text(example)
    folder.joinpath("go.mod").write_text(
        "module pay\n\ngo 1.19\n\nrequire semel.example/semel v0.0.0\n\n"
        "replace semel.example/semel => ./semel\n"
    )
    build([found("go"), "build", "-o", "pay", "."], folder)
    return [str(folder / "pay")]


def java(example: str, folder: Path) -> list[str]:
    folder.joinpath("Pay.java").write_text(example)
    client = ROOT / "clients" / "java" / "Semel.java"
    build([found("javac"), "-d", ".", str(client), "Pay.java"], folder)
    return [found("java"), "-cp", str(folder), "Pay"]


def python(example: str, folder: Path) -> list[str]:
    folder.joinpath("pay.py").write_text(example)
    return [sys.executable, str(folder / "pay.py")]


EXAMPLES = {"javascript": javascript, "go": go, "java": java, "python": python}


@pytest.mark.parametrize("language", [*LANGUAGES, "python"])
def test_the_example_charges_once(language, service, tmp_path):
    (example,) = re.findall(f"```{language}\n(.*?)```", README, re.DOTALL)
    assert URL in example
    here = service.url.removeprefix("http://")
    command = EXAMPLES[language](example.replace(URL, here), tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(Path(semel.__file__).parent.parent)}
    runs = []
    for _ in range(2):
        run = subprocess.run(
            command,
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        runs.append(run)
    assert [(run.returncode, run.stdout, run.stderr) for run in runs] == [
        (0, "charging\nch_1\n", ""),
        (0, "ch_1\n", ""),
    ]
