"""The command itself: usage, settings, exit codes, keys, and what it does to pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from semel import __version__
from semel.cli import main

NOWHERE = "redis://127.0.0.1:1/0"


def test_without_a_command_it_tells_how_to_use_it(semel_sqlite):
    said = semel_sqlite()
    assert said.code == 2
    assert "usage: semel" in said.err


def test_help_names_every_command_and_the_exit_codes(semel_sqlite):
    said = semel_sqlite("--help")
    assert said.code == 0
    for name in ("list", "find", "show", "stuck", "watch", "forget", "resolve", "purge", "migrate"):
        assert name in said.out
    assert "exit codes" in said.out


def test_the_version_is_told(semel_sqlite):
    assert semel_sqlite("--version").out.strip() == f"semel {__version__}"


@pytest.mark.parametrize(
    "words",
    [
        ("list", "--limit", "0"),
        ("list", "--limit", "many"),
        ("list", "--limit", "1000000001"),
        ("stuck", "--limit", "9" * 5000),
        ("purge", "--batch", str(2**63)),
        ("list", "--state", "abroad"),
        ("stuck", "--older-than", "yesterday"),
        ("stuck", "--older-than=-5m"),
        ("list", "--age", "long"),
        ("stuck", "--older-than", "36501d"),
        ("watch", "--every", "0"),
        ("watch", "--every", "9" * 400),
        ("watch", "--count", "0"),
        ("find",),
        ("find", ""),
        ("find", "urn:semel:key:28ba"),
        ("show", "orders"),
        ("resolve", "orders", "a"),
        ("resolve", "orders", "a", "--failed", "x", "--succeeded", "1"),
        ("--url", "no-store", "list"),
        ("--url", "nothing://here", "list"),
        ("show", "orders", "a key with spaces"),
        ("--config", "missing.toml", "list"),
        ("purge", "--every", "0"),
        ("purge", "--abandoned-after", "0s"),
        ("resolve", "orders", "a", "--succeeded", "1", "--ttl", "0"),
        ("resolve", "orders", "a", "--succeeded", "1", "--by", ""),
        ("resolve", "orders", "a", "--failed", " "),
        ("reconcile", "--resolvers", "a:b", "--by", ""),
    ],
)
def test_wrong_usage_is_exit_code_2(semel_sqlite, words):
    said = semel_sqlite(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (("stuck", "--scoop", "http"), "usage: semel stuck "),
        (("find", "a", "b"), "usage: semel find "),
        (("resolve", "orders", "a", "--failed", "no", "--ever"), "usage: semel resolve "),
    ],
)
def test_an_argument_that_is_not_known_shows_the_usage_of_the_command(semel_sqlite, words, usage):
    said = semel_sqlite(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(usage)
    assert "error: unrecognized arguments: " in said.err


@pytest.mark.parametrize("command", ["show", "forget", "resolve"])
def test_a_key_that_cannot_be_stored_so_leads_to_find(semel_sqlite, command):
    more = ("--failed", "no") if command == "resolve" else ()
    said = semel_sqlite.on_store(command, "http", "ann/x y/c-79", *more)
    assert (said.code, said.out) == (2, "")
    assert "at position 5; of an HTTP request, tenant and key are stored percent-enc" in said.err
    assert said.err.endswith(": semel find KEY shows it\n")


def test_a_store_that_cannot_be_reached_is_exit_code_1(semel_sqlite):
    said = semel_sqlite("--url", NOWHERE, "list")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("semel: ")


def test_settings_come_from_the_environment_a_file_or_the_options(semel_sqlite, monkeypatch):
    semel_sqlite.succeed("order:1")
    url = semel_sqlite.url
    assert "no URL was given" in semel_sqlite("list").err, "the default is a file of its own"
    Path("semel.toml").write_text(f'url = "{url}"\n')
    assert "order:1" in semel_sqlite("list").out
    Path("semel.toml").rename("other.toml")
    assert "order:1" in semel_sqlite("--config", "other.toml", "list").out
    assert "order:1" in semel_sqlite("list", "--config", "other.toml").out
    assert "order:1" in semel_sqlite("list", "--url", url).out
    assert semel_sqlite("list").code == 2, "the named file was for one command"
    monkeypatch.setenv("SEMEL_URL", url)
    assert "order:1" in semel_sqlite("list").out
    assert "order:1" not in semel_sqlite("--prefix", "other:", "list").out
    monkeypatch.setenv("SEMEL_CONFIG", "other.toml")
    assert "order:1" in semel_sqlite("--config", "other.toml", "list").out


COMMANDS = [
    ("list",),
    ("show", "orders", "a"),
    ("find", "a"),
    ("stuck",),
    ("watch", "--count", "1"),
    ("counts",),
    ("forget", "orders", "a"),
    ("resolve", "orders", "a", "--failed", "no"),
    ("purge",),
    ("reconcile", "--resolvers", "somewhere:resolvers"),
]
"""Those that look at a store, but for doctor, which reports what is wrong with it."""


@pytest.fixture
def somewhere():
    Path("somewhere.py").write_text("resolvers = {}\n")


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_mistyped_path_is_said_and_makes_no_file(semel_sqlite, words):
    before = set(Path().iterdir())
    said = semel_sqlite("--url", "sqlite:///smel.db", *words)
    assert (said.code, said.out) == (2, "")
    assert f"there is no SQLite database {Path('smel.db').absolute()}" in said.err
    assert {path for path in set(Path().iterdir()) - before if path.suffix == ".db"} == set()


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("words", [*COMMANDS, ("migrate",)], ids=lambda words: words[0])
def test_a_store_in_memory_has_nothing_to_show(semel_sqlite, words):
    said = semel_sqlite("--url", "memory://", *words)
    assert (said.code, said.out) == (2, "")
    assert "memory://" in said.err


def test_a_mistyped_path_behind_redis_is_said_too(semel_sqlite, redis_url):
    Path("semel.toml").write_text(f'url = "{redis_url}"\nbehind = "sqlite:///smel.db"\n')
    said = semel_sqlite("counts")
    assert said.code == 2
    assert "there is no SQLite database" in said.err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('url = "nothing://here"', "no store knows the scheme"),
        ('url = "sqlite:///smel.db"', "no SQLite database"),
        ('url = "memory://"', "memory://"),
        ("ulr = 1", "did you mean url"),
        ("url = ", "not valid TOML"),
    ],
)
@pytest.mark.parametrize("command", ["list", "migrate"])
def test_an_error_in_the_named_file_names_it(semel_sqlite, text, complaint, command):
    Path("other.toml").write_text(text)
    said = semel_sqlite("--config", "other.toml", command)
    if "smel.db" in text and command == "migrate":
        assert said.code == 0, "a new database is what it is for"
        return
    assert said.code == 2
    assert "other.toml: " in said.err
    assert complaint in said.err


def test_a_file_that_is_missing_is_told_by_its_option(semel_sqlite):
    said = semel_sqlite("--config", "missing.toml", "list")
    assert said.err == "semel: --config: there is no file missing.toml\n"


def test_the_named_file_is_not_blamed_for_another_url(semel_sqlite, monkeypatch):
    Path("other.toml").write_text("")
    words = ("--config", "other.toml", "list")
    assert "other.toml" not in semel_sqlite("--url", "nothing://here", *words).err
    monkeypatch.setenv("SEMEL_URL", "nothing://here")
    assert "other.toml" not in semel_sqlite(*words).err


def test_a_store_that_cannot_list_is_said(semel_sqlite, plain_url):
    said = semel_sqlite("--url", plain_url, "list")
    assert said.code == 2
    assert "cannot list" in said.err


def test_new_keys_are_made_without_a_store(semel_sqlite):
    first, second = (semel_sqlite("new-key").out.strip() for _ in range(2))
    assert uuid.UUID(first) != uuid.UUID(second)
    assert semel_sqlite("new-key", "--app", "shop").out.startswith("shop-")
    assert semel_sqlite("new-key", "--app", "a shop").code == 2


def test_a_reader_that_has_seen_enough_is_no_error(semel_sqlite):
    for number in range(3):
        semel_sqlite.succeed(f"order:{number}")
    # The reader is gone before anything is written.
    line = f"{sys.executable} -m semel --url {semel_sqlite.url} list; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"( {line} ) | true"], capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.split()[-1] in {"0", "141"}


def test_messages_for_a_closed_stderr_do_not_go_to_the_output(semel_sqlite, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it after 2>&-
    assert semel_sqlite.on_store("show", "orders", "missing", "--json") == (1, "", "")


def test_an_interruption_ends_it_quietly(semel_sqlite, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("semel.cli.reading.counts", interrupted)
    assert semel_sqlite.on_store("counts").code == 130


def test_a_broken_pipe_is_answered(monkeypatch, tmp_path):
    def broken(options):
        raise BrokenPipeError

    target = (tmp_path / "out").open("w")
    monkeypatch.setattr("semel.cli.reading.counts", broken)
    monkeypatch.setattr(sys, "stdout", target)
    assert main(["--url", "memory://", "counts"]) == 141
    target.write("this goes nowhere")
    target.close()
    assert (tmp_path / "out").read_text() == ""


def ended(arguments, redirected, **environ):
    """Run the command in a shell, with its output sent somewhere; give its code and complaints."""
    command = f'"{sys.executable}" -m semel {arguments}'
    done = subprocess.run(
        ["bash", "-c", f"{command} {redirected}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stderr


BUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


@BUFFERED
@pytest.mark.parametrize("arguments", ["counts", "list --json", "--help", "--version"])
def test_an_output_that_cannot_be_written_is_one_line(semel_sqlite, arguments, unbuffered):
    semel_sqlite.on_store("migrate")
    code, complaint = ended(
        f"--url {semel_sqlite.url} {arguments}", "> /dev/full", PYTHONUNBUFFERED=unbuffered
    )
    if arguments.startswith("--") and unbuffered:
        assert (code, complaint) == (0, "")  # argparse has noticed, and says nothing
    else:
        assert code == 1
        assert re.fullmatch(r"semel: .*No space left on device\n", complaint)


def test_a_closed_output_is_one_line_before_anything_is_done(tmp_path):
    code, complaint = ended(f"--url sqlite:///{tmp_path}/new.db migrate", ">&-")
    assert code == 2
    assert complaint == "semel: the standard output is closed; to drop it, write >/dev/null\n"
    assert not (tmp_path / "new.db").exists()


def test_help_for_a_closed_output_is_written_all_the_same():
    code, complaint = ended("--help", ">&-")
    assert code == 0
    assert complaint.startswith("usage: semel")


@BUFFERED
def test_a_reader_that_went_away_ends_it_quietly_as_sigpipe_would(semel_sqlite, unbuffered):
    semel_sqlite.on_store("migrate")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:  # noqa: PTH123 - a descriptor
        done = subprocess.run(
            [sys.executable, "-m", "semel", "--url", semel_sqlite.url, "counts"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(semel_sqlite, monkeypatch):
    def unreadable(options):
        raise PermissionError(13, "Permission denied", "secrets.toml")

    monkeypatch.setattr("semel.cli.reading.counts", unreadable)
    with pytest.raises(PermissionError):
        semel_sqlite.on_store("counts")


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["show", "pay", "-x"], "semel show SCOPE -- -x"),
        (["forget", "pay", "--x"], "semel forget SCOPE -- -x"),
        (["resolve", "pay", "-x", "--failed", "no"], "semel resolve SCOPE -- -x"),
        (["find", "-x"], "semel find -- -x"),
    ],
    ids=lambda words: words[0],
)
def test_a_key_that_looks_like_an_option_is_explained(semel_sqlite, words, way_out):
    said = semel_sqlite.on_store(*words)
    assert said.code == 2
    assert f"a key that begins with - goes after --: {way_out}" in said.err


def test_a_key_behind_two_dashes_may_begin_with_one(semel_sqlite):
    semel_sqlite.succeed("-x")
    assert semel_sqlite.on_store("show", "orders", "--", "-x").code == 0
    assert semel_sqlite.on_store("show", "orders", "--json", "--", "-x").data["key"] == "-x"
    assert semel_sqlite.on_store("find", "--", "-x").code == 0
    assert semel_sqlite.on_store("forget", "orders", "--", "-x").code == 0
