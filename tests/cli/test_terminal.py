"""What a person at a terminal gets: colour, progress, questions, a table that is drawn again."""

from __future__ import annotations

import io
import json
import re
import signal
import sqlite3
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path

import pytest

from cli.conftest import OWNER
from cli.terminals import own_terminal, plain, sitting
from semel.cli import terminal
from semel.core.records import Encoded, Identity
from semel.stores.urls import open_store

RED, GREEN, END = "\x1b[31m", "\x1b[32m", "\x1b[0m"


def seen(url, *words, **options):
    """What a command writes to a terminal, and its exit code."""
    with sitting(url, *words, **options) as seat:
        code = seat.wait()
    return code, seat.seen


INTO_A_FILE = {"to": ">written"}


def written(url, *words, **options):
    """What it writes to the terminal, or into the file."""
    _, shown = seen(url, *words, **options)
    return Path("written").read_text() if options == INTO_A_FILE else shown


@pytest.fixture
def stored(semel_sqlite):
    semel_sqlite.succeed("order:1")
    semel_sqlite.abandon("order:2")
    return semel_sqlite


# --- colour --------------------------------------------------------------------------------------


def test_what_stands_out_has_a_colour_on_a_terminal(stored):
    _, listed = seen(stored.url, "list")
    assert f"{GREEN}succeeded{END}" in listed
    assert f"{RED}abandoned{END}" in listed
    assert f"{RED}yes{END}" in listed
    assert listed.startswith("\x1b[1mSCOPE ")
    assert f"{RED}abandoned{END}" in seen(stored.url, "show", "orders", "order:2")[1]
    assert f"{RED}yes{END}" in seen(stored.url, "stuck")[1]
    assert f"{GREEN}ok{END}" in seen(stored.url, "doctor")[1]


def test_colour_moves_no_column(stored):
    assert (
        plain(seen(stored.url, "list", "--state", "abandoned")[1]).split("\n")[0]
        == (stored.on_store("list", "--state", "abandoned").out.split("\n")[0])
    )


@pytest.mark.parametrize(
    "options",
    [{"NO_COLOR": "1"}, {"TERM": "dumb"}, INTO_A_FILE],
    ids=["NO_COLOR", "dumb", ">"],
)
def test_there_is_no_colour_where_it_is_not_wanted(stored, options):
    for words in (("list",), ("show", "orders", "order:2"), ("stuck",), ("doctor",)):
        shown = written(stored.url, *words, **options)
        assert shown
        assert "\x1b" not in shown


def test_an_empty_no_color_is_none(stored):
    assert GREEN in seen(stored.url, "list", NO_COLOR="")[1]


# --- progress ------------------------------------------------------------------------------------


SECONDS = re.compile(r" \(\d+ s\)")


def lines_of(text):
    """What the line of a terminal showed, one after the other, without the seconds."""
    lines = (SECONDS.sub("", line).strip() for line in re.split("[\r\n]", text))
    return [line for line in lines if line]


def test_find_shows_how_far_it_is_and_leaves_nothing_of_it(stored):
    code, shown = seen(stored.url, "find", "order:1", "--json", at_once=True, to=">found.json")
    assert code == 0
    assert lines_of(shown) == ["2 records read, 1 found"]
    assert re.search(r"found \(\d+ s\)", shown), "with the time that it has taken"
    assert shown.endswith("\r"), "the line is empty again"
    assert "order:1" in Path("found.json").read_text()


def test_a_search_for_a_digest_and_a_list_show_it_too(stored):
    _, shown = seen(stored.url, "show", "--digest", "orders", "0" * 32, at_once=True)
    assert lines_of(shown)[0] == "2 records read"
    _, shown = seen(stored.url, "list", at_once=True, to=">listed")
    assert lines_of(shown) == ["2 records read"]


def test_purge_shows_how_far_it_is(semel_sqlite):
    with closing(open_store(semel_sqlite.url)) as store:
        for number in range(5):
            store.put(Identity("old", str(number)), Encoded("json/1", b"1"), 1e-6, owner=OWNER)
    words = ("purge", "--batch", "2", "--pause", "0")
    code, shown = seen(semel_sqlite.url, *words, at_once=True)
    assert code == 0
    assert lines_of(shown) == [
        *(f"{number} records removed" for number in (2, 4, 5)),
        "removed 5 records",
    ]


def test_reconcile_shows_how_far_it_is(stored):
    Path("own_resolvers.py").write_text(
        "from semel.repair import Succeeded\nresolvers = {'orders': lambda _: Succeeded(1)}\n"
    )
    words = ("reconcile", "--resolvers", "own_resolvers:resolvers", "--older-than", "0", "--full")
    _, shown = seen(stored.url, *words, at_once=True)
    shown = lines_of(shown)
    assert shown[0] == "1 running records read, 1 of them stuck"
    assert shown[1] == "looking into 1 of 1 stuck records"
    logged = [line for line in shown if "semel." in line]
    assert logged
    assert all(line.startswith("20") for line in logged), "each on a line of its own"
    assert shown[-1].startswith("resolved 1, ")


def test_the_log_needs_no_progress(stored):
    words = ("resolve", "orders", "order:2", "--failed", "declined", "--ttl", "3d")
    _, shown = seen(stored.url, *words, size=(24, 400))
    assert "semel.audit INFO decision=Resolved" in shown


def test_short_work_shows_no_progress(monkeypatch):
    monkeypatch.setattr(terminal, "DELAY", 3600.0)
    with own_terminal() as (stream, shown):
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.Progress() as progress:
            progress.show("1 records read")
        stream.write("all of it")
        stream.flush()
        assert shown() == "all of it"


def test_what_no_person_sees_has_no_progress(stored):
    for to in ("2>complaints", "2>&-"):
        code, shown = seen(stored.url, "find", "order:1", at_once=True, to=to)
        assert code == 0
        assert "records read" not in shown
    assert Path("complaints").read_text() == ""


def test_progress_fits_into_one_line_and_is_not_drawn_too_often(stored, monkeypatch):
    _, shown = seen(stored.url, "find", "x", at_once=True, size=(24, 10), to=">found")
    assert lines_of(shown)[0] == "2 records"
    _, shown = seen(stored.url, "find", "x", at_once=True, size=(0, 0), to=">found")
    assert lines_of(shown)[0] == "2 records read, 0 found", "it does not know its size"
    with own_terminal() as (stream, shown):
        monkeypatch.setattr(terminal, "DELAY", 0.0)
        monkeypatch.setattr(terminal, "INTERVAL", 3600.0)
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal.Progress() as progress:
            progress.show("first")
            progress.show("too early")
        assert lines_of(shown()) == ["first"]


# --- questions -----------------------------------------------------------------------------------


@pytest.fixture(params=["running", "held"])
def doubtful(request, semel):
    """A record whose operation may have happened."""
    if request.param == "running":
        semel.run("order:1")
    else:
        semel.abandon("order:1")
    return semel


@pytest.mark.parametrize(("typed", "gone"), [("y\n", True), ("YES\n", True), ("n\n", False)])
def test_forget_asks_before_it_removes_what_may_have_happened(doubtful, typed, gone):
    with sitting(doubtful.url, "forget", "orders", "order:1") as seat:
        seat.read_until("Forget it? [y/N] ")
        assert doubtful.get("order:1") is not None
        seat.type(typed)
        code = seat.wait()
    assert code == (0 if gone else 1)
    assert ("forgotten: the next call runs again" in seat.seen) is gone
    assert ("nothing was forgotten" in seat.seen) is not gone
    assert (doubtful.get("order:1") is None) is gone


@pytest.mark.parametrize("typed", ["\n", "\x04", "yellow\n"], ids=["enter", "Ctrl-D", "yellow"])
def test_whatever_is_no_yes_is_a_no(semel_sqlite, typed):
    semel_sqlite.abandon("order:1")
    with sitting(semel_sqlite.url, "forget", "orders", "order:1") as seat:
        seat.read_until("[y/N] ")
        seat.type(typed)
        assert seat.wait() == 1
    assert seat.seen.endswith("\r\nnothing was forgotten\r\n")
    assert semel_sqlite.get("order:1") is not None


def test_ctrl_c_at_the_question_forgets_nothing(semel_sqlite):
    semel_sqlite.abandon("order:1")
    with sitting(semel_sqlite.url, "forget", "orders", "order:1") as seat:
        seat.read_until("[y/N] ")
        seat.type("\x03")
        assert seat.wait() == 130
    assert "Traceback" not in seat.seen
    assert semel_sqlite.get("order:1") is not None


def test_the_question_says_what_is_at_stake(semel_sqlite):
    semel_sqlite.run("order:1")
    semel_sqlite.abandon("order:2")
    for key, told in (
        ("order:1", "orders order:1 is running, with a lease for another 9m"),
        ("order:2", "orders order:2 is held: it was abandoned "),
    ):
        with sitting(semel_sqlite.url, "forget", "orders", key, size=(24, 300)) as seat:
            seat.read_until("[y/N] ")
            assert seat.seen.startswith(told)
            assert "what has happened already happens twice" in seat.seen


@pytest.mark.parametrize("meanwhile", ["ended", "gone", "adopted"])
def test_what_changes_while_a_person_thinks_is_not_forgotten(semel_sqlite, meanwhile):
    semel_sqlite.run("order:1")
    identity = Identity("orders", "order:1")
    with (
        sitting(semel_sqlite.url, "forget", "orders", "order:1") as seat,
        closing(open_store(semel_sqlite.url)) as store,
    ):
        seat.read_until("[y/N] ")
        if meanwhile == "ended":
            store.complete(identity, OWNER, Encoded("json/1", b"1"), 60.0)
        elif meanwhile == "gone":
            store.forget(identity)
        else:
            store.renew(identity, OWNER, 0.0)
            store.adopt(identity, bytes(12), 60.0)
        before = store.get(identity)
        seat.type("y\n")
        assert seat.wait() == 1
        after = store.get(identity)
    assert "nothing was forgotten: the record changed" in seat.seen
    assert (before and before.owner) == (after and after.owner)


def test_where_nobody_can_answer_the_command_needs_a_yes(doubtful):
    said = doubtful.on_store("forget", "orders", "order:1")
    assert (said.code, said.out) == (2, "")
    assert re.search("(use resolve|Wait until it has ended), or confirm with --yes", said.err)
    assert doubtful.get("order:1") is not None
    with sitting(doubtful.url, "forget", "orders", "order:1", to="</dev/null") as seat:
        assert seat.wait() == 2
    assert doubtful.get("order:1") is not None
    assert doubtful.on_store("forget", "orders", "order:1", "--yes").code == 0
    assert doubtful.get("order:1") is None


def test_a_record_that_cannot_be_read_can_be_forgotten(semel_sqlite):
    semel_sqlite.succeed("order:1")
    with closing(sqlite3.connect(semel_sqlite.url.removeprefix("sqlite:///"))) as database:
        database.execute("UPDATE idempotent_record SET status = 9")
        database.commit()
    for answer, code in (("n", 1), ("y", 0)):
        with sitting(semel_sqlite.url, "forget", "orders", "order:1") as seat:
            seat.read_until("cannot be read: it may be running or held")
            seat.read_until("[y/N] ")
            seat.type(f"{answer}\n")
            assert seat.wait() == code
    assert "it was unreadable: it may have happened already" in seat.seen
    assert semel_sqlite.get("order:1") is None


def test_what_runs_again_anyway_and_what_has_ended_is_forgotten_without_a_question(semel):
    semel.abandon("free", hold=False)
    semel.succeed("done")
    semel.fail("failed", final=True)
    for key in ("free", "done", "failed"):
        assert semel.on_store("forget", "orders", key).code == 0
        assert semel.get(key) is None


# --- watch ---------------------------------------------------------------------------------------

OWN_SCREEN, BACK = "\x1b[?1049h", "\x1b[?1049l"


def test_watch_draws_what_is_stuck_again_until_ctrl_c(semel):
    with sitting(semel.url, "watch", "--every", "20ms") as seat:
        seat.read_until("nothing is stuck")
        semel.abandon("order:1")
        at = seat.read_until("1 stuck, 1 of them held, the oldest for ")
        at = seat.read_until("order:1", at)
        semel.on_store("forget", "orders", "order:1", "--yes")
        seat.read_until("nothing is stuck", at)
        seat.type("\x03")
        assert seat.wait() == 0
    assert seat.seen.startswith(OWN_SCREEN)
    own, _, after = seat.seen.partition(BACK)
    assert own.count("\x1b[H") > 2, "each drawn over the one before"
    assert "\x1b[?25h" in own, "the cursor is back"
    assert plain(after).split("\n")[1:] == ["nothing is stuck", ""], "the last one stays"
    assert "Traceback" not in seat.seen


def test_watch_puts_the_terminal_in_order_after_sigterm(semel_sqlite):
    with sitting(semel_sqlite.url, "watch") as seat:
        seat.read_until("nothing is stuck")
        seat.signal(signal.SIGTERM)
        assert seat.wait() == 0
    assert BACK in seat.seen


def test_watch_fits_into_the_window(semel_sqlite):
    for number in range(12):
        semel_sqlite.abandon(f"order:{number}")
    code, shown = seen(semel_sqlite.url, "watch", "--count", "1", size=(10, 80))
    assert code == 0
    own, _, after = shown.partition(BACK)
    assert len(plain(own).split("\n")) == 10
    assert "... and 7 more lines" in own
    assert len(plain(after).split("\n")) == 4 + 12 + 1, "all of it, as the window can be scrolled"


@pytest.mark.parametrize("options", [{"TERM": "dumb"}, INTO_A_FILE], ids=["dumb", ">"])
def test_without_a_screen_watch_writes_one_plain_table_after_the_other(stored, options):
    shown = written(stored.url, "watch", "--every", "10ms", "--count", "2", **options)
    assert "\x1b" not in shown
    assert shown.count("SCOPE") == shown.count("order:2") == 2


def test_watch_tells_by_its_exit_code_what_it_saw_last(stored):
    words = ("watch", "--count", "1", "--older-than")
    assert stored.on_store(*words, "0").code == 1
    assert stored.on_store(*words, "1h").code == 0
    before = signal.getsignal(signal.SIGTERM)
    assert stored.on_store("watch", "--count", "2", "--every", "1ms").out.count("order:2") == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_watch_outlasts_a_store_that_is_away(own_redis):
    with sitting(own_redis.url, "watch", "--every", "20ms") as seat:
        seat.read_until("nothing is stuck")
        own_redis.kill()
        at = seat.read_until("store unreachable; trying again")
        own_redis.restart()
        seat.read_until("nothing is stuck", at)
        seat.type("\x03")
        assert seat.wait() == 0


def test_a_store_that_stays_away_is_exit_code_1(own_redis, capsys):
    own_redis.kill()
    with sitting(own_redis.url, "watch", "--every", "20ms", "--count", "2") as seat:
        assert seat.wait() == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_lacks_a_character_gets_an_escape(semel_sqlite, monkeypatch, encoding):
    semel_sqlite.succeed("日本é", {"city": "大阪é"})
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert semel_sqlite.on_store("list").code == 0
    assert semel_sqlite.on_store("show", "orders", "日本é", "--result", "--json").code == 0
    table, brace, shown = out.buffer.getvalue().decode(encoding).partition("{")
    assert ("日本é" if encoding == "utf-8" else "\\u65e5\\u672c") in table
    assert json.loads(brace + shown)["result"] == {"city": "大阪é"}


def test_output_may_go_to_any_text_stream(semel_sqlite):
    with redirect_stdout(io.StringIO()) as out:
        assert semel_sqlite.on_store("counts", "--json").code == 0
    assert json.loads(out.getvalue())["succeeded"] == 0
