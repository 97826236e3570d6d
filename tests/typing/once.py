# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What mypy and pyright must say of decorated functions; nothing here is ever run.

A line with `type: ignore` is a mistake that both must see: an ignore that is not needed fails too.
"""

from __future__ import annotations

from typing import assert_type

import semel
from semel import AsyncIdempotency, Idempotency, Outcome, Policy, Record

idem = Idempotency("memory://")
aidem = AsyncIdempotency("memory://")


# --- functions -----------------------------------------------------------------------------


@idem.once
def bare(order: int, note: str = "") -> list[int]:
    return [order]


@idem.once("order:{order}", payload="order", ttl=60, message="once", policy=Policy.payment())
def create(order: int, *, note: str = "") -> dict[str, int]:
    return {note: order}


@idem.once(key=lambda order: f"{order}", payload=lambda order: order, scope="orders")
def by_callable(order: int) -> None:
    return None


@semel.once(key="{order}", payload=["order"])
def by_default(order: int) -> str:
    return str(order)


@semel.once
def bare_by_default(order: int) -> str:
    return str(order)


assert_type(bare(1, note="x"), list[int])
assert_type(bare.run(1), Outcome[list[int]])
assert_type(bare.run(1).value, list[int])
assert_type(bare.key_for(1), str)
assert_type(bare.forget(1), bool)
assert_type(bare.peek(1), Record | None)
assert_type(create(1, note="x"), dict[str, int])
assert_type(by_default(1), str)
assert_type(bare_by_default(1), str)
by_callable(1)

bare("1")  # type: ignore[arg-type]
bare()  # type: ignore[call-arg]
bare.run(1, 2)  # type: ignore[arg-type]
bare.key_for(order="1")  # type: ignore[arg-type]
create(1, "x")  # type: ignore[call-arg]
idem.once(5)  # type: ignore[call-overload]
idem.once("{a}", retention=5)  # type: ignore[call-overload]


# --- methods -------------------------------------------------------------------------------


class Till:
    @idem.once("{self}:{order}")
    def pay(self, order: int) -> str:
        return str(order)

    @staticmethod
    @idem.once("{order}")
    def count(order: int) -> int:
        return order

    @aidem.once("{self}:{order}")
    async def pay_later(self, order: int) -> str:
        return str(order)


assert_type(Till().pay(1), str)
assert_type(Till().pay.run(1), Outcome[str])
assert_type(Till().pay.key_for(1), str)
assert_type(Till.pay(Till(), 1), str)
assert_type(Till.pay.run(Till(), 1), Outcome[str])
assert_type(Till.count(1), int)
assert_type(Till.count.run(1), Outcome[int])
Till().pay("1")  # type: ignore[arg-type]
Till().pay(1, 2)  # type: ignore[call-arg]
Till.pay(1)  # type: ignore[call-arg, arg-type]


# --- async ---------------------------------------------------------------------------------


@aidem.once
async def bare_async(order: int) -> list[int]:
    return [order]


@aidem.once("{order}", ttl=60)
async def create_async(order: int) -> str:
    return str(order)


async def use() -> None:
    assert_type(await bare_async(1), list[int])
    assert_type(await create_async(1), str)
    assert_type(await create_async.run(1), Outcome[str])
    assert_type(create_async.key_for(1), str)
    assert_type(await create_async.forget(1), bool)
    assert_type(await create_async.peek(1), Record | None)
    assert_type(await Till().pay_later(1), str)
    assert_type(await Till().pay_later.run(1), Outcome[str])
    await create_async("1")  # type: ignore[arg-type]
    await Till().pay_later()  # type: ignore[call-arg]


def plain(order: int) -> int:
    return order


aidem.once("{order}")(plain)  # type: ignore[arg-type]


# --- class and static methods, in either order -----------------------------------------------


class Register:
    @idem.once("{order}")
    @staticmethod
    def closed(order: int) -> int:
        return order

    @staticmethod
    @idem.once("{order}")
    def counted(order: int, *, note: str = "") -> int:
        return order

    @idem.once("{order}")
    @classmethod
    def outside(cls, order: int, *, note: str = "") -> str:
        return cls.__name__

    @classmethod
    @idem.once("{order}")
    def inside(cls, order: int, *, note: str = "") -> str:
        return cls.__name__

    @semel.once
    @classmethod
    def bare(cls, order: int) -> str:
        return cls.__name__

    @aidem.once("{order}")
    @classmethod
    async def outside_later(cls, order: int) -> str:
        return cls.__name__

    @classmethod
    @aidem.once("{order}")
    async def inside_later(cls, order: int) -> str:
        return cls.__name__

    def used_inside(self) -> None:
        assert_type(self.outside(1), str)
        assert_type(self.inside.run(1), Outcome[str])
        assert_type(self.closed(1), int)

    @classmethod
    def used_by_the_class(cls) -> None:
        assert_type(cls.outside(1), str)
        assert_type(cls.inside.run(1), Outcome[str])
        assert_type(cls.closed(1), int)


class Child(Register): ...


assert_type(Register.closed(1), int)
assert_type(Register.closed.run(1), Outcome[int])
assert_type(Register().closed.run(1), Outcome[int])
assert_type(Child().counted(1, note="x"), int)
Register.closed("1")  # type: ignore[arg-type]
Register().counted()  # type: ignore[call-arg]

assert_type(Register.outside(1, note="x"), str)
assert_type(Register.outside.run(1), Outcome[str])
assert_type(Register().outside(1), str)
assert_type(Child.outside.peek(1), Record | None)
assert_type(Register.inside(1, note="x"), str)
assert_type(Register.inside.run(1), Outcome[str])
assert_type(Register().inside.key_for(1), str)
assert_type(Child.inside.forget(1), bool)
assert_type(Register.bare.run(1), Outcome[str])
Register.outside("1")  # type: ignore[arg-type]
Register.inside("1")  # type: ignore[arg-type]
Register.outside(Register, 1)  # type: ignore[call-arg, arg-type]
Register().inside.run()  # type: ignore[call-arg]
Child().bare(1, 2)  # type: ignore[call-arg]


async def use_class_methods() -> None:
    assert_type(await Register.outside_later(1), str)
    assert_type(await Register().outside_later.run(1), Outcome[str])
    assert_type(await Child.inside_later(1), str)
    assert_type(await Child().inside_later.peek(1), Record | None)
    await Register.outside_later("1")  # type: ignore[arg-type]
    await Child.inside_later()  # type: ignore[call-arg]


# A function whose first parameter is a class is no class method.


@idem.once("{order}")
def by_kind(kind: type[Register], order: int) -> str:
    return kind.__name__


assert_type(by_kind(Register, 1), str)
assert_type(by_kind.run(Register, order=1), Outcome[str])


# --- once in each slot of time -------------------------------------------------------------


@idem.once_per("day", tz="Europe/Berlin", standby=True)
def nightly() -> int:
    return 1


@semel.once_per(lambda now: f"{now.year}", ttl=86400)
def yearly(tenant: str) -> None:
    return None


@aidem.once_per(900, standby=60)
async def often() -> None:
    return None


class Reports:
    @idem.once_per("week", key="{self}")
    def weekly(self, part: int) -> None:
        return None


assert_type(nightly(), bool)
assert_type(yearly("a"), bool)
assert_type(nightly.slot().name, str)
assert_type(nightly.peek(), Record | None)
assert_type(Reports().weekly(1), bool)
yearly()  # type: ignore[call-arg]
nightly(1)  # type: ignore[call-arg]
Reports().weekly("1")  # type: ignore[arg-type]
idem.once_per("fortnight")  # type: ignore[arg-type]


async def awaited() -> None:
    assert_type(await often(), bool)
