"""What is stored may come from anywhere: no terminal obeys it, and no log line is forged by it."""

from __future__ import annotations

import io
import logging

import pytest

from semel.cli.terminal import LogLines, say
from semel.core.observers import Log
from semel.core.records import Identity
from semel.stores.redis.commands import KeyLayout

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mALL GOOD\x1b[0m\r\n2026 semel ERROR forged\x9b2J"
HOSTILE = Identity(f"a{ESCAPES}", "k")


@pytest.fixture
def hostile(redis_of_this_worker, redis_url, capsys):
    """A Redis with a record that cannot be read, whose scope is made of escapes."""
    from cli.conftest import Terminal

    terminal = Terminal(redis_url, capsys)
    terminal.succeed("good")
    with redis_of_this_worker.client() as client:
        client.set(KeyLayout("idem:").record(HOSTILE), b"\x07garbage")
    return terminal


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["list", "--json"],
        ["find", "k"],
        ["counts"],
        ["stuck"],
        ["doctor"],
        ["show", HOSTILE.scope, "k"],
        ["forget", HOSTILE.scope, "k"],
    ],
    ids=lambda words: words[0],
)
def test_a_record_that_cannot_be_read_sends_the_terminal_nothing_to_obey(hostile, words, caplog):
    said = hostile.on_store(*words)
    for stream in (said.out, said.err, caplog.text):
        assert all(each.isprintable() or each == "\n" for each in stream), repr(stream)
    assert "\n2026" not in said.err


def test_an_unreadable_record_is_named_by_its_digest(hostile, caplog):
    hostile.on_store("list")
    assert HOSTILE.key_digest in caplog.text


def test_texts_and_errors_in_a_line_of_the_log_are_escaped(caplog):
    Log("semel.test").warning("%s and %s after %d", ESCAPES, ValueError(ESCAPES), 7)
    (line,) = caplog.messages
    assert line.isprintable()
    assert line.endswith("after 7")
    assert "\\x1b[31mALL GOOD" in line


def test_a_traceback_in_the_log_of_the_command_is_escaped():
    stream = io.StringIO()
    error = ValueError(ESCAPES)
    record = logging.LogRecord(
        "semel", logging.ERROR, "", 0, "it failed", (), (ValueError, error, None)
    )
    LogLines(stream).emit(record)
    text = stream.getvalue()
    assert "ValueError: \\x1b]0;owned" in text
    assert all(each.isprintable() or each == "\n" for each in text)


def test_what_the_command_says_keeps_its_lines(capsys):
    say(f"one\ntwo {ESCAPES[:8]}")
    assert capsys.readouterr().err == "one\ntwo \\x1b]0;owne\n"
