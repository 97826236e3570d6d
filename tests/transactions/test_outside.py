"""Every use of the marks inside a block warns: they do not belong to its transaction."""

from __future__ import annotations

import pytest

from semel.transactions import OutsideTransaction
from transactions.kinds import KINDS

pytestmark = pytest.mark.parametrize(
    "world",
    [kind for kind in KINDS if kind.name in {"psycopg", "asyncpg", "pymysql", "asyncmy"}],
    ids=lambda kind: kind.name,
    indirect=True,
)

CALLS = {
    "check": ("k",),
    "exists": ("k",),
    "set": ("k",),
    "do": ("k", lambda: None),
    "set_result": ("k", 1),
    "get_result": ("k", None),
    "delete": ("k",),
    "ttl": ("k",),
    "refresh": ("k",),
    "clear": ("k",),
    "check_many": (["k"],),
    "exists_many": (["k"],),
    "set_many": (["k"],),
    "set_result_many": ({"k": 1},),
    "get_result_many": (["k"],),
    "delete_many": (["k"],),
}


async def used(world, mark, arguments):
    return await mark(*arguments) if world.kind.asynchronous else mark(*arguments)


async def test_every_call_of_the_marks_warns_once_at_the_place_where_it_is_used(world):
    async with world.engine() as idem, world.work() as work:
        public = {name for name in dir(idem.marks) if not name.startswith("_")}
        assert public == set(CALLS)
        async with world.once(idem, work):
            for name, arguments in CALLS.items():
                with pytest.warns(OutsideTransaction, match="committed at once") as warned:
                    await used(world, getattr(idem.marks, name), arguments)
                assert [warning.filename for warning in warned] == [__file__], name


async def test_outside_of_a_block_and_on_another_store_nothing_is_said(world):
    async with world.engine() as idem, world.engine() as another:
        await world.done(idem.marks.set("before"))
        async with world.work() as work, world.once(idem, work):
            assert await world.done(another.marks.check("before"))
