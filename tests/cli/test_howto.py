"""The commands by which a person decides, as the page on repair shows them, with what they print."""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest

from cli.conftest import OWNER
from semel.cli import deciding, parser, reading
from semel.core.records import ClaimRequest, Encoded, Identity
from semel.core.run_info import build
from semel.core.stored_answers import StoredAnswer, pack_answer
from semel.stores.urls import open_store

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "repair.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOMENT = re.compile(r"\d{4}\\-\d\d\\-\d\dT\d\d:\d\d:\d\d\\\+00:00")
BILL = b'{"$":"dataclass","t":"shop:Bill","v":{"total":{"$":"decimal","v":"4.20"}}}'
LINES = ((b"content-type", b"application/json"), (b"location", b"/orders/6"))


def examples() -> list[tuple[str, str]]:
    """The commands that resolve or show, each with the output that the page shows below it."""
    found = []
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        for text in block.split("$ ")[1:]:
            command, _, output = text.replace("\\\n", "").partition("\n")
            if command.startswith(("semel resolve", "semel show")):
                found.append((command, output))
    return found


def expected(output: str) -> str:
    """Make a pattern of what a page shows: times are others each day, dots stand for anything."""
    pattern = MOMENT.sub(r"[-\\dT:+]+", re.escape(output))
    return pattern.replace(re.escape("..."), "(?:.|\\n)*")


@pytest.fixture
def prepared(semel_sqlite):
    """What the page talks about: attempts that are held, and one that has ended."""

    def prepare(options) -> None:
        key = options.key
        if options.run is deciding.resolve and options.digest:
            named = (f"order:{number}" for number in range(100))
            key = next(k for k in named if Identity(options.scope, k).key_digest == options.key)
        with closing(open_store(semel_sqlite.url)) as store:
            identity = Identity(options.scope, key)
            if options.run is reading.show and options.result:
                answer = pack_answer(StoredAnswer(201, LINES, b'{"id": 6}'))
                store.put(identity, Encoded("http/1", answer), 60.0, owner=OWNER)
                return
            if options.run is deciding.resolve and options.like is not None:
                similar = Identity(options.scope, options.like)
                store.put(similar, Encoded("json/1", BILL), 60.0, owner=OWNER)
            codec = {"http": "http/1", "grpc": "grpc/1"}.get(options.scope, "json/1")
            info = build("web-1:4711", 3 * 86400, codec)
            store.claim(ClaimRequest(identity, OWNER, None, 600.0, 600.0, hold=True, run_info=info))
            store.renew(identity, OWNER, 0.0)

    Path("receipt.pdf").write_bytes(b"%PDF-1.7")
    Path("order.bin").write_bytes(b"\x08\x07")
    return prepare


@pytest.mark.parametrize(("command", "output"), examples(), ids=lambda text: text[:60])
def test_a_command_of_the_page_does_what_the_page_shows(semel_sqlite, prepared, command, output):
    words = shlex.split(command, comments=True)[1:]
    prepared(parser().parse_args(words))
    said = semel_sqlite.on_store(*words)
    assert (said.code, said.err if said.code else "") == (0, "")
    if output:
        assert re.fullmatch(expected(output), said.out), said.out


def test_the_page_has_an_example_of_every_kind():
    commands = " ".join(command for command, _ in examples())
    for option in ("--succeeded", "--failed", "--status", "--header", "--body", "--message"):
        assert option in commands, option
    assert sum(bool(output) for _, output in examples()) >= 4
