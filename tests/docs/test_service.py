"""The pages of the service and the proxy: their commands, their programs, and their tables.

`<!-- run: name -->` above a block of a page gives its commands to a shell, those of one name in
order, with a service or a proxy of its own at the address that the page shows. What they print has
to be what the page shows; names, numbers, and times that no page can know may differ.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import semel
from docs.test_examples import ROOT
from semel.core.codec import encode_result
from semel.core.policy import Policy, resolve
from semel.core.records import Identity
from semel.server.app import create_app
from semel.server.metrics import Metrics
from semel.server.openapi import document
from semel.server.problems import CODES
from semel.server.proxy import _PROBLEMS as PROXY_PROBLEMS
from semel.server.service import Service
from semel.server.tokens import RIGHTS
from semel.server.values import Plain, plain
from server.conftest import SEMEL, RunningService
from server.node import NODE
from server.proxies import Proxy

PAGES = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("operate/service.md", "protect/service.md", "protect/proxy.md")
}
REFERENCE = (ROOT / "docs" / "reference" / "service.md").read_text(encoding="utf-8")
SERVICE, PROXY = "http://127.0.0.1:8600", "http://127.0.0.1:8601"

RUN = re.compile(r"^<!-- run: (\w+) -->\n```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)

VARYING = {"owner", "fence", "waited", "instance"}
"""Members of an answer that no page can know."""
OF_THE_SERVER = {"date", "server", "content-length", "connection"}


# --- the commands --------------------------------------------------------------------------------


class Step(NamedTuple):
    """A command of a page, and what it prints there."""

    command: str
    output: str


def steps(page: str, scenario: str) -> list[Step]:
    found = []
    for name, text in RUN.findall(PAGES[page]):
        if name == scenario:
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                lines = part.splitlines()
                end = next(n for n in range(1, len(lines) + 1) if is_whole("\n".join(lines[:n])))
                found.append(Step("\n".join(lines[:end]), "\n".join(lines[end:])))
    return found


def is_whole(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:  # a quote is open
        return False
    return not command.endswith("\\")


def printed(commands: list[str], folder: Path) -> list[str]:
    """What each of the commands prints, in one shell."""
    script = "".join(f"{command}\nprintf '\\0'\n" for command in commands)
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def comparable(text: str) -> Any:
    if text.startswith("HTTP/"):
        head, _, body = text.replace("\r", "").partition("\n\n")
        first, *lines = head.split("\n")
        named = {tuple(line.lower().split(": ", 1)) for line in lines}
        kept = {line for line in named if line[0] not in OF_THE_SERVER}
        return first, kept, comparable(body.strip())
    if not text.startswith("{"):
        return text
    answer = json.loads(text)
    varying = dict.fromkeys(VARYING & answer.keys(), "(any)")
    keys = [key[: key.index("-")] for key in answer.get("keys", [])]
    return {**answer, **varying, **({"keys": keys} if keys else {})}


def assert_as_shown(page: str, scenario: str, shown: str, real: str, folder: Path) -> None:
    expected = steps(page, scenario)
    assert expected
    outputs = printed([step.command.replace(shown, real) for step in expected], folder)
    for step, output in zip(expected, outputs, strict=True):
        assert comparable(output.strip()) == comparable(step.output.strip()), step.command


def has_curl() -> bool:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        return False
    told = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"curl (\d+)\.(\d+)", told)
    return found is not None and (int(found[1]), int(found[2])) >= (7, 82)


needs_curl = pytest.mark.skipif(not has_curl(), reason="there is no curl 7.82 here")


@contextmanager
def running(folder: Path) -> Iterator[RunningService]:
    service = RunningService(folder, f"sqlite:///{folder / 'semel.db'}", (), {})
    try:
        yield service
        assert service.stop() == 0
    finally:
        service.process.kill()


@needs_curl
@pytest.mark.parametrize(
    ("page", "scenario"), [("operate/service.md", "first"), ("protect/service.md", "verbs")]
)
def test_the_commands_of_a_page_print_what_it_shows(page, scenario, tmp_path):
    with running(tmp_path) as service:
        assert_as_shown(page, scenario, SERVICE, service.url, tmp_path)


class Payments(BaseHTTPRequestHandler):
    """The service behind the proxy; it counts."""

    served = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).served += 1
        body = json.dumps({"payment": self.served}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@needs_curl
def test_the_commands_of_the_proxys_page_print_what_it_shows(tmp_path):
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Payments)
    serving = threading.Thread(target=upstream.serve_forever)
    serving.start()
    try:
        proxy = Proxy(tmp_path, f"http://127.0.0.1:{upstream.server_port}")
        try:
            real = f"http://127.0.0.1:{proxy.port}"
            assert_as_shown("protect/proxy.md", "proxy", PROXY, real, tmp_path)
        finally:
            proxy.stop()
    finally:
        upstream.shutdown()
        serving.join()
        upstream.server_close()
    assert Payments.served == 1


def test_every_block_that_should_run_is_run():
    named = {(page, name) for page, text in PAGES.items() for name, _ in RUN.findall(text)}
    assert named == {
        ("operate/service.md", "first"),
        ("protect/service.md", "verbs"),
        ("protect/proxy.md", "proxy"),
    }
    for page, text in PAGES.items():
        assert text.count("<!-- run: ") == len(RUN.findall(text)), page


# --- the programs --------------------------------------------------------------------------------


def program(language: str) -> str:
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```$", PAGES["protect/service.md"], re.MULTILINE | re.DOTALL
    )
    (code,) = blocks
    return code


def javascript(folder: Path, code: str) -> list[str]:
    shutil.copy(ROOT / "clients" / "javascript" / "semel.mjs", folder)
    (folder / "receipts.mjs").write_text(code)
    return [NODE, "receipts.mjs"]


def python(folder: Path, code: str) -> list[str]:
    (folder / "receipts.py").write_text(code)
    return [sys.executable, "receipts.py"]


def go(folder: Path, code: str) -> list[str]:
    (folder / "go.mod").write_text("module shop\n\ngo 1.19\n")
    (folder / "main.go").write_text(code)
    (folder / "semel").mkdir()
    shutil.copy(ROOT / "clients" / "go" / "semel.go", folder / "semel")
    return ["go", "run", "."]


def java(folder: Path, code: str) -> list[str]:
    (folder / "SendReceipt.java").write_text(code)
    (folder / "semel").mkdir()
    shutil.copy(ROOT / "clients" / "java" / "Semel.java", folder / "semel")
    subprocess.run(["javac", "SendReceipt.java"], cwd=folder, check=True)
    return ["java", "SendReceipt"]


LANGUAGES = {"js": javascript, "python": python, "go": go, "java": java}
COMMANDS = {"go": "go", "java": "javac"}
"""What may be missing; Node comes from a wheel."""


def run_program(language: str, url: str, folder: Path) -> str:
    folder.mkdir()
    code = program(language)
    assert SERVICE in code
    command = LANGUAGES[language](folder, code.replace(SERVICE, url))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_")}
    environment |= {"PYTHONPATH": str(Path(semel.__file__).parent.parent), "GOFLAGS": "-mod=mod"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("first", "second"), [("js", "python"), ("python", "js"), ("go", "js"), ("java", "python")]
)
def test_two_programs_in_two_languages_send_one_receipt(first, second, tmp_path):
    for language in (first, second):
        if shutil.which(COMMANDS.get(language, sys.executable)) is None:
            pytest.skip(f"there is no {COMMANDS[language]} here")
    with running(tmp_path) as service:
        one = run_program(first, service.url, tmp_path / "first")
        other = run_program(second, service.url, tmp_path / "second")
    assert "receipt for order-7" in one
    assert "receipt for order-7" in other
    assert (one + other).count("ann@example.com") == 1


# --- the files -----------------------------------------------------------------------------------


def test_the_page_shows_the_files_as_they_are():
    shown = dict(SHOWN.findall(PAGES["operate/service.md"]))
    assert shown.keys() == {f"deploy/{path.name}" for path in (ROOT / "deploy").iterdir()}
    for name, text in shown.items():
        assert text == (ROOT / name).read_text(encoding="utf-8"), name


# --- the tables ----------------------------------------------------------------------------------


def rows(text: str, heading: str, nth: int = 0) -> list[list[str]]:
    """The cells of the nth table under a heading, without its first two lines."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    (section,) = re.findall(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL
    )
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    lines = tables[nth].splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


API: Any = json.loads(document())


def schema(name: str) -> Any:
    return API["components"]["schemas"][name]


def resolved(found: Any) -> Any:
    return schema(found["$ref"].rpartition("/")[2]) if "$ref" in found else found


def kind(found: Any) -> str:
    """What a page says of a type: its limits."""
    found = resolved(found)
    if "enum" in found and len(found["enum"]) > 1:
        return ", ".join(f"`{name}`" for name in sorted(found["enum"], key=OUTCOMES.index))
    least, most = found.get("minimum"), found.get("maximum")
    shortest, longest = found.get("minLength"), found.get("maxLength")
    match found.get("type"):
        case "string" if shortest is not None and shortest == longest:
            return f"text, {longest} hex digits"
        case "string" if longest is not None:
            return f"text, {shortest} to {longest}" if shortest else f"text, up to {longest}"
        case "string":
            return "text"
        case "number" | "integer" as named:
            return named if most is None else f"{named}, {least:g} to {most:g}"
        case "boolean" | "object" as named:
            return named
        case "array":
            return f"list of pairs, up to {found['maxItems']}"
    return "any"


OUTCOMES = ["forget", "retryable", "final", "unknown"]


@pytest.mark.parametrize("verb", ["start", "renew", "finish", "fail", "keys"])
def test_the_reference_has_every_field_of_a_verb_with_its_limits(verb):
    asked = schema(verb.capitalize())
    told = {codes(field)[0]: (type_, default) for field, type_, default, _ in rows(REFERENCE, verb)}
    assert told.keys() == asked["properties"].keys()
    for name, (type_, default) in told.items():
        assert type_ == kind(asked["properties"][name]), name
        assert (default == "required") is (name in asked["required"]), name
    simple = {
        name: value["default"]
        for name, value in asked["properties"].items()
        if isinstance(value.get("default"), bool | int | float)
    }
    for name, value in simple.items():
        assert json.loads(codes(told[name][1])[0]) == value, name


def test_the_reference_has_the_fields_of_a_response():
    properties = schema("Response")["properties"]
    told = {codes(field)[0]: type_ for field, type_, _, _ in rows(REFERENCE, "finish", 1)}
    assert told == {name: kind(value) for name, value in properties.items()}


@pytest.mark.parametrize(
    ("heading", "nth", "answers"),
    [
        ("start", 1, ["Run"]),
        ("start", 2, ["DoneResult", "DoneResponse"]),
        ("renew", 1, ["Renewed"]),
        ("finish", 2, ["Stored"]),
        ("fail", 1, ["Recorded"]),
        ("keys", 1, ["NewKeys"]),
    ],
)
def test_the_reference_has_every_field_of_an_answer(heading, nth, answers):
    told = {codes(row[0])[0] for row in rows(REFERENCE, heading, nth)}
    assert told == {name for answer in answers for name in schema(answer)["properties"]}


def test_the_reference_has_every_endpoint():
    service: Any = Service(None, None)  # which no request reaches
    app = create_app(service)
    endpoints = {codes(row[0])[0]: row for row in rows(REFERENCE, "Endpoints")}
    assert endpoints.keys() == {
        f"{'POST' if 'POST' in route.methods else 'GET'} {route.path}" for route in app.routes
    }
    for path, methods in API["paths"].items():
        for method, told in methods.items():
            row = endpoints[f"{method.upper()} {path}"]
            assert path in ("/live", "/ready") or row[1] == told["summary"]
    assert {name for row in endpoints.values() for name in codes(row[2])} == RIGHTS.keys()


def test_both_pages_have_every_error():
    expected = {code: (str(k.status), "yes" if k.retry else "no") for code, k in CODES.items()}
    for text in (REFERENCE, PAGES["protect/service.md"]):
        nth = 1 if text is REFERENCE else 0
        told = {codes(row[0])[0]: (row[1], row[2]) for row in rows(text, "Errors", nth)}
        assert told == expected
    titles = {codes(row[0])[0]: row[3] for row in rows(REFERENCE, "Errors", 1)}
    assert titles == {code: k.title for code, k in CODES.items()}
    members = {codes(row[0])[0] for row in rows(REFERENCE, "Errors", 0)}
    known = schema("Problem")
    assert members == known["properties"].keys() - set(known["required"])


def test_the_page_has_every_right():
    told = {codes(row[0])[0] for row in rows(PAGES["operate/service.md"], "Tokens")}
    assert told == RIGHTS.keys()


def test_the_page_has_every_metric():
    told = {
        codes(row[0])[0]: codes(row[1])
        for row in rows(PAGES["operate/service.md"], "Health and metrics", 1)
    }
    metrics = Metrics(Service(None, None))  # which has had no request
    assert told.keys() == set(re.findall(r"^# TYPE (\S+)", metrics.text(), re.MULTILINE))


def test_the_page_of_the_proxy_has_every_option_and_every_problem():
    done = subprocess.run([*SEMEL, "proxy", "--help"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.MULTILINE))
    page = PAGES["protect/proxy.md"]
    told = {name for row in rows(page, "Options") for name in re.findall(r"--[a-z-]+", row[0])}
    assert told == known
    for code in PROXY_PROBLEMS:
        assert f"`{code}`" in page, code


@dataclasses.dataclass
class Receipt:
    total: int


class Color(enum.Enum):
    RED = "red"


def test_what_the_pages_say_of_a_python_result_is_so():
    rules = resolve(Policy())

    def seen(value: object) -> Any:
        kept = encode_result(value, rules.codec, Identity("s", "k"), None, 1000)
        found = plain(kept.encoded)
        assert isinstance(found, Plain)
        msgspec.json.encode(found.value)
        return found

    at = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    for value, told in [
        (decimal.Decimal("10.00"), "10.00"),
        (at, "2026-01-31T12:00:00+00:00"),
        (dt.timedelta(minutes=1.5), "90"),
        (b"\xff", "/w=="),
        ((1, 2), [1, 2]),
        ({1: "a"}, {"1": "a"}),
        (Color.RED, "RED"),
        (Receipt(7), {"total": 7}),
        (2**53, str(2**53)),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ]:
        assert seen(value) == (told, True), value
    for value in (None, True, "text", 1.5, [1], {"a": 1}, 2**53 - 1):
        assert seen(value) == (value, False)
