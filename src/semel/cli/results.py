"""Results on the command line: how options give one, and how a stored one is shown.

What is shown has no character that a terminal would act upon: results come from clients.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from shlex import quote
from typing import Final, assert_never

import msgspec

from semel.cli.formatting import as_json, exhausted
from semel.core import run_info
from semel.core.codec import BY_STORED_NAME
from semel.core.observers import printable
from semel.core.records import Record
from semel.core.stored_answers import GRPC, HTTP
from semel.errors import ConfigError
from semel.repair import (
    Failed,
    GrpcAnswer,
    HttpAnswer,
    NotKept,
    PlainValue,
    ReadableResult,
    StoredFailure,
    Succeeded,
    Unreadable,
    read_result,
)
from semel.repair.results import in_form_of, read_shown

HEAD = 32
"""Bytes of binary data that are shown."""
SUMMARY = 100
"""Characters of a result in a list."""
SHOWN = 10_000
"""Characters of a body that are shown."""
LARGEST = 100_000_000
"""Bytes that are read from a file: more than a store takes, and less than fills the memory."""

_SERVER_ERRORS: Final = range(500, 600)
"""Statuses that tell of a failure of the server."""
_LINES: Final = "\n\t"
"""Characters that lay out a text of several lines."""
_CHARSET: Final = re.compile(r"""charset=["']?([\w.:-]+)""", re.IGNORECASE)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that no text has."""
_NO_CHARSETS: Final = frozenset({"idna", "punycode"})
"""Codecs for the names of hosts: the time they take grows with the square of the length."""

# --- from options --------------------------------------------------------------------------------


def resolution_of(options: Namespace, model: object = None) -> Succeeded | Failed:
    """Return what a person says became of an attempt; `model` is a result of the same form."""
    if options.like is not None and options.succeeded is None:
        raise ConfigError("--like goes with --succeeded")
    if options.retryable and options.failed is None:
        raise ConfigError("--retryable goes with --failed")
    if options.status is None and (options.header or options.body is not None):
        raise ConfigError("--header and --body go with --status")
    if options.failed is not None:
        return Failed(options.failed, options.retryable)
    if options.status is not None:
        return Succeeded(_answer(options))
    if options.message is not None:
        return Succeeded(GrpcAnswer(_content("--message", options.message)))
    return Succeeded(read_shown(in_form_of(given_tree(options), model)))


def given_tree(options: Namespace) -> object:
    """Read what --succeeded gives."""
    try:
        return msgspec.json.decode(options.succeeded)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"--succeeded takes the result as JSON: {error}; "
            """a text has quotes of its own, as in --succeeded '"ch_42"', nothing is null"""
        ) from error


def _answer(options: Namespace) -> HttpAnswer:
    """Make the answer of a request; what a client could not use is rejected: it would be final."""
    if options.status in _SERVER_ERRORS:
        raise ConfigError(
            f"a response with status {options.status} says that the request failed, but --status "
            "is for what happened: every retry would get it. If it did not happen, use --failed "
            "TEXT, with --retryable if the next call may run"
        )
    headers = tuple(map(_header, options.header))
    body = "" if options.body is None else options.body
    # As the shell gave it: a text in another encoding than ours stays the same bytes.
    content = _content("--body", body) if body.startswith("@") else os.fsencode(body)
    if content and not any(map(_is_type, headers)):
        raise ConfigError(
            "the response has a body but no Content-Type, so clients can't read it: add "
            "one, such as --header 'Content-Type: application/json', or, for a response that has "
            "none, --header 'Content-Type:'"
        )
    # Empty is the way to say that there is none.
    lines = tuple(line for line in headers if line[1] or not _is_type(line))
    return HttpAnswer(options.status, lines, content)


def _is_type(line: tuple[str, str]) -> bool:
    return line[0].lower() == "content-type"


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise ConfigError(f"--header takes a whole line, such as 'Location: /o/7'; got {line!r}")
    return name.strip(), value.strip()


def _content(option: str, given: str) -> bytes:
    """Read the bytes that `@FILE` names; `@-` is the standard input."""
    if not given.startswith("@"):
        raise ConfigError(
            f"{option} takes the bytes of the serialized message from a file, as in {option} "
            f"@FILE, or from the standard input: {option} @-"
        )
    if given == "@":
        raise ConfigError(f"{option}: no file is named behind the @")
    try:
        content = _read(given[1:])
    except OSError as error:
        raise ConfigError(f"{option}: {given[1:]} cannot be read: {error.strerror}") from error
    if len(content) > LARGEST:
        raise ConfigError(f"{option}: {given[1:]} has more than {LARGEST:,} bytes")
    return content


def _read(path: str) -> bytes:
    """Read a file, or as much of it as shows that it is too large."""
    if path != "-":
        with Path(path).open("rb") as file:
            return file.read(LARGEST + 1)
    if sys.stdin is None:
        raise ConfigError("the standard input is closed")
    return sys.stdin.buffer.read(LARGEST + 1)


_GIVEN: Final = {
    **dict.fromkeys(BY_STORED_NAME, "--succeeded JSON"),
    HTTP: "--status CODE --header 'NAME: VALUE' --body TEXT",
    GRPC: "--message @FILE",
}
"""The options that give a result, by the codec that has to read it."""


def how_to_decide(record: Record) -> str:
    """Return the command that decides what became of an abandoned attempt."""
    info = run_info.read(record.run_info)
    command = f"semel resolve {_name(record)}"
    if info is None and record.hold:  # of an older release: how long to keep it is not known
        command += " --ttl TIME"
    failed = "--failed TEXT, with --retryable if the next call may run"
    given = "--succeeded JSON" if info is None else _GIVEN.get(info.codec)
    begin = "to decide: "
    if exhausted(record):
        begin = f"{how_to_run_again(record)}\nto decide instead: "
        failed = "--failed TEXT"
    elif not record.hold:
        begin = (
            "not held: the next call runs it again, and nothing has to be decided\n"
            "to decide before that: "
        )
    if given is None:
        return f"{begin}{command} {failed}; its codec is known to its program alone"
    return f"{begin}{command} {given}; or {failed}"


def how_to_run_again(record: Record) -> str:
    """Return what lets an operation run again whose policy allows no further attempt."""
    return (
        "exhausted: its policy allows no further attempt, so calls get AttemptsExhausted\n"
        f"to run it again: semel forget {_name(record)}, then send it again"
    )


def _name(record: Record) -> str:
    """Return the arguments by which a command finds this record."""
    name = f"{quote(record.scope)} {quote(record.key)}"
    if record.key.startswith("-") or not name.isprintable():  # else it would be read otherwise
        return f"--digest {quote(printable(record.scope))} {record.identity.key_digest}"
    return name


# --- to show -------------------------------------------------------------------------------------


def result_text(record: Record) -> str:
    """Show what is stored as result or error, all of it, for a person."""
    if record.outcome is None:
        return "no result: the operation has not ended"
    result = read_result(record.outcome)
    if isinstance(result, PlainValue):
        return printable(as_json(result.value), but=_LINES)
    return printable("\n".join([_summary(result), *_details(result)]), but=_LINES)


def result_summary(record: Record) -> str:
    """Show what is stored as result or error in one line of a list."""
    if record.outcome is None:
        return "-"
    line = printable(" ".join(_summary(read_result(record.outcome)).splitlines()))
    return line if len(line) <= SUMMARY else f"{line[:SUMMARY]}..."


def result_data(record: Record) -> object:
    """Return what is stored as result or error as plain data, for programs."""
    if record.outcome is None:
        return None
    result = read_result(record.outcome)
    match result:
        case PlainValue():
            return result.value
        case HttpAnswer():
            text = _text_of(result)
            body = text if text is not None or result.body is None else _binary(result.body)
            return {"status": result.status, "headers": result.lines, "body": body}
        case GrpcAnswer():
            message = None if result.message is None else _binary(result.message)
            return {"code": result.code, "details": result.details, "message": message}
        case Unreadable():
            return {"codec": result.codec, **_binary(result.data)}
        case _:
            return _summary(result)


def _summary(result: ReadableResult) -> str:
    match result:
        case HttpAnswer():
            return f"HTTP {result.status}, {_size(result.body)}"
        case GrpcAnswer(code="OK"):
            return f"gRPC OK, {_size(result.message)}"
        case GrpcAnswer():
            return f"gRPC {result.code}: {result.details}"
        case PlainValue():
            return msgspec.json.encode(result.value, enc_hook=str).decode()
        case NotKept():
            return f"no result is available: {result.reason}"
        case StoredFailure():
            return f"{result.type_name}: {result.message}"
        case Unreadable():
            return f"{_size(result.data)} of codec {result.codec}, which cannot be read here"
        case _:
            assert_never(result)


def _details(result: ReadableResult) -> list[str]:
    match result:
        case HttpAnswer():
            lines = [f"{name}: {value}" for name, value in result.lines]
            text = _text_of(result)
            if text is None:
                return [*lines, *_head(result.body)]
            more = f"... ({len(text)} characters; --json shows all)" if len(text) > SHOWN else ""
            return [*lines, "", f"{text[:SHOWN]}{more}"]
        case GrpcAnswer():
            return _head(result.message)
        case Unreadable():
            return _head(result.data)
        case _:
            return []


def _text_of(answer: HttpAnswer) -> str | None:
    """Decode the body of an answer; None if it is no text."""
    if answer.body is None:
        return None
    kinds = (line[1] for line in answer.lines if _is_type(line))
    charset = _CHARSET.search(next(kinds, ""))
    try:
        codec = codecs.lookup("utf-8" if charset is None else charset[1]).name
        if codec in _NO_CHARSETS:
            return None
        text = answer.body.decode(codec)
        text.encode()  # some codecs read what is half a character
    except (LookupError, UnicodeError):
        return None
    return None if _CONTROL.search(text) else text


def _size(data: bytes | None) -> str:
    return "too large to be kept" if data is None else f"{len(data)} bytes"


def _head(data: bytes | None) -> list[str]:
    if not data:
        return []
    return ["", f"{data[:HEAD].hex(' ')}{' ...' if len(data) > HEAD else ''}"]


def _binary(data: bytes) -> dict[str, object]:
    return {"size": len(data), "hex": data.hex()}
