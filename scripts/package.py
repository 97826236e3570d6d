"""Builds the package, checks it, and uses it as an application does that has only installed it.

    scripts/package.py              build into dist/, check, install into a new environment, try
    scripts/package.py --release    and insist on real addresses, and on a checkout without changes

The source distribution holds every file that git does not ignore, the tests among them.

The wheel is built from the source distribution, which proves that this one is complete. The build
uses the hatchling of this environment, and downloads nothing. The new environment has semel and its
dependencies only, and runs each Python example of the README that needs no extra.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

PROJECT: Final = Path(__file__).resolve().parents[1]
DIST: Final = PROJECT / "dist"
NEEDED: Final = ("Documentation", "Source")
"""Where the README's links and pictures lead to (scripts/package_readme.py)."""
RESERVED: Final = re.compile(r"^$|(^|\.)(example(\.(com|net|org))?|invalid|test|localhost)$")

_EXAMPLE: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Run every step; the first that fails ends it."""
    options = argparse.ArgumentParser(description="build and check the package")
    options.add_argument("--release", action="store_true", help="insist on what a release needs")
    release = options.parse_args().release

    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    unset = missing(settings["project"].get("urls", {}))
    if release and unset:
        print(f"[project.urls] of pyproject.toml needs real addresses: {', '.join(unset)}")
        return 1
    if release and output("git", "status", "--porcelain"):
        print("The checkout has changes that are not committed, or files that git does not know.")
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    build, twine = ([sys.executable, "-m", tool] for tool in ("build", "twine"))
    try:
        run(*build, "--no-isolation", "--outdir", DIST, PROJECT)
        run(*twine, "check", "--strict", *sorted(DIST.iterdir()))
        (wheel,) = DIST.glob("*.whl")
        with tempfile.TemporaryDirectory() as folder:
            use(wheel, Path(folder))
    except subprocess.CalledProcessError as error:
        print(error)
        return 1
    if unset:
        print(f"Not ready for a release: [project.urls] needs {', '.join(unset)}.")
    return 0


def missing(urls: Mapping[str, str]) -> list[str]:
    """Name the URLs that a release needs and lacks, or whose host is reserved (RFC 2606)."""
    return [
        name
        for name in dict.fromkeys((*NEEDED, *urls))
        if name not in urls or RESERVED.search(urlsplit(urls[name]).hostname or "")
    ]


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel into a new environment, and run the command and the README's examples."""
    run(sys.executable, "-m", "venv", folder / "venv")
    python, semel = folder / "venv/bin/python", folder / "venv/bin/semel"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--constraint", PROJECT / "constraints.txt", wheel)
    run(*pip, "check")
    run(semel, "--version")
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    example = folder / "readme.py"
    alone = [code for code in _EXAMPLE.findall(readme) if not wants(code)]
    example.write_text("\n".join(alone), encoding="utf-8")
    run(python, "-W", "error", example, folder=folder)
    print(f"{len(alone)} of the README's examples need no extra, and work with the wheel.")


def wants(code: str) -> set[str]:
    """Return the packages that an example needs beside semel."""
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(code))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    return imported - {"semel"} - sys.stdlib_module_names


def output(*command: str) -> str:
    """Run a command, and return what it prints."""
    return subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout


def run(*command: object, folder: Path = PROJECT) -> None:
    """Run a command, and raise an error if it fails."""
    words = [str(word) for word in command]
    # Nothing from the caller's PYTHONPATH stands in for what the wheel lacks.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    print("$", *words, flush=True)
    subprocess.run(words, cwd=folder, env=env, check=True)


if __name__ == "__main__":
    sys.exit(main())
