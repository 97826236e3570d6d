"""What a running record says about its attempt: written within 200 bytes, and read from anything."""

import os
import socket

import msgspec
import pytest

from semel.core import judge
from semel.core.records import LONGEST, RUN_INFO_BYTES, ClaimRequest, Identity, RenewRequest
from semel.core.run_info import LONGEST_CODEC, LONGEST_WHY, RunInfo, build, process_name, read
from semel.errors import ConfigError

SOME = Identity("payments", "order:42")


def test_it_is_compact_json_that_a_person_can_read() -> None:
    written = build("web-1:4711", 259200.0, "json", "TimeoutError")
    assert written == b'{"by":"web-1:4711","ttl":259200,"codec":"json","why":"TimeoutError"}'


def test_without_a_reason_it_has_none() -> None:
    written = build("web-1:4711", 0.25, "json")
    assert written == b'{"by":"web-1:4711","ttl":0.25,"codec":"json"}'
    assert read(written) == RunInfo("web-1:4711", 0.25, "json", None)


@pytest.mark.parametrize("host", ["h" * 300, "é" * 300])
@pytest.mark.parametrize("why", [None, "E" * 300, "É" * 300])
@pytest.mark.parametrize("codec", ["json", "c" * (LONGEST_CODEC - 2)])
@pytest.mark.parametrize("ttl", [259200.0, LONGEST - 0.123])
def test_what_is_too_long_is_cut_so_that_pid_and_codec_stay(
    host: str, why: str | None, codec: str, ttl: float
) -> None:
    written = build(f"{host}:4711", ttl, codec, why)
    assert RUN_INFO_BYTES - 1 <= len(written) <= RUN_INFO_BYTES
    info = read(written)
    assert info is not None
    assert (info.ttl, info.codec) == (ttl, codec)
    assert f"{host}:4711".endswith(info.by)
    assert len(info.by.encode()) >= 31
    if why is None:
        assert info.why is None
    else:
        assert info.why is not None
        assert why.startswith(info.why)
        assert len(info.why.encode()) == LONGEST_WHY


@pytest.mark.parametrize("codec", ["c" * (LONGEST_CODEC - 1), '"' * 32])
def test_the_name_of_a_codec_is_never_cut_because_a_part_could_name_another(codec: str) -> None:
    assert read(build("web-1:4711", 60.0, codec)) == RunInfo("web-1:4711", 60, "")


@pytest.mark.parametrize("odd", ["\0", "\n", "\x1b", '"', "\\", "\udcff"])
def test_what_is_not_printable_is_replaced(odd: str) -> None:
    info = read(build(f"web-{odd}:4711", 60.0, "json", f"Error{odd}"))
    assert info == RunInfo("web-?:4711", 60, "json", "Error?")
    assert len(build(odd * 300, 60.0, "json", odd * 300)) == RUN_INFO_BYTES


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff",
        b"{}",
        b"[]",
        b'{"by":"web-1:4711","ttl":259200,"cod',
        b'{"by":"\xff","ttl":1,"codec":"json"}',
        b'{"by":1,"ttl":1,"codec":"json"}',
        b'{"by":"a","ttl":0,"codec":"json"}',
        b'{"by":"a","ttl":-1,"codec":"json"}',
        b'{"by":"a","ttl":1e300,"codec":"json"}',
        b'{"by":"a","ttl":null,"codec":"json"}',
        b'{"by":"a","ttl":1,"codec":"json","later":' + b"[" * 100_000,
    ],
)
def test_what_is_damaged_reads_as_nothing(damaged: bytes) -> None:
    assert read(damaged) is None


def test_fields_of_a_later_version_are_skipped() -> None:
    later = msgspec.json.encode({"by": "a:1", "ttl": 60, "codec": "json", "zone": "b"})
    assert read(later) == RunInfo("a:1", 60, "json")


def test_a_process_is_named_by_host_and_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMEL_NAME", raising=False)
    assert process_name() == f"{socket.gethostname()}:{os.getpid()}"
    monkeypatch.setenv("SEMEL_NAME", "")
    assert process_name() == f"{socket.gethostname()}:{os.getpid()}"


def test_semel_name_names_it_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL_NAME", "payments-7f9c")
    assert process_name() == "payments-7f9c"


@pytest.mark.parametrize("odd", ["\n", "\x1b", '"', "\udcff"])
def test_a_name_is_printable_and_no_longer_than_a_record_can_keep(
    monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    monkeypatch.setenv("SEMEL_NAME", f"{'x' * 10_000}web{odd}3")
    assert process_name() == f"{'x' * (RUN_INFO_BYTES - 5)}web?3"


def test_what_is_written_refuses_more_than_a_record_keeps() -> None:
    most, more = b"x" * RUN_INFO_BYTES, b"x" * (RUN_INFO_BYTES + 1)
    _, record = judge.claim(None, ClaimRequest(SOME, b"a", None, 30.0, 60.0, run_info=most), 1.0)
    assert record is not None
    assert record.run_info == most
    with pytest.raises(ConfigError, match="run_info has 201 bytes, and a record keeps at most 200"):
        judge.claim(None, ClaimRequest(SOME, b"a", None, 30.0, 60.0, run_info=more), 1.0)
    assert RenewRequest(SOME, b"a", 30.0, most).run_info == most
    with pytest.raises(ConfigError, match="run_info has 201 bytes"):
        RenewRequest(SOME, b"a", 30.0, more)


def test_a_limit_of_attempts_is_told_unless_it_is_endless():
    assert read(build("web-1:4711", 60.0, "json", most=5)).most == 5
    assert read(build("web-1:4711", 60.0, "json", most=10**6)).most is None
    written = build("x" * 300, 1e9, "c" * 62, "w" * 300, 999_999)
    assert len(written) == RUN_INFO_BYTES
    assert len(read(written).by) >= 32
