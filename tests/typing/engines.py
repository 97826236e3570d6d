# pyright: reportUnnecessaryTypeIgnoreComment=true
"""What mypy and pyright must say of the methods of both engines; nothing here is ever run.

A line with `type: ignore` is a mistake that both must see: an ignore that is not needed fails too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, assert_type

import semel
from semel import AsyncIdempotency, Attempt, Idempotency, Outcome, Policy, Record
from semel.core.policy import Failure
from semel.engine._sync.marks import Marks


def count() -> int:
    return 1


def name() -> str:
    return ""


def nothing() -> None:
    return None


async def count_async() -> int:
    return 1


def of_threads(idem: Idempotency) -> None:
    assert_type(idem.execute("k", count), int)
    assert_type(idem.execute("k", lambda: [1]), list[int])
    assert_type(idem.execute("k", count, returns=int, payload={"a": 1}, scope="s"), int)
    assert_type(idem.run("k", name), Outcome[str])
    assert_type(idem.run("k", name).value, str)
    assert_type(idem.run("k", name).replayed, bool)
    assert_type(idem.run("k", name).attempt, Attempt[str])
    assert_type(idem.run("k", name).attempt.result, str)
    assert_type(idem.consume("k", nothing, ttl=timedelta(days=1)), bool)
    assert_type(idem.peek("k"), Record | None)
    assert_type(idem.forget("k", scope="s"), bool)
    with idem.attempt("k", payload=1, policy=Policy(ttl=5)) as attempt:
        assert_type(attempt, Attempt)
        assert_type(attempt.replayed, bool)
        assert_type(attempt.number, int)
        assert_type(attempt.fence, int)
        assert_type(attempt.derive("capture"), str)
        assert_type(attempt.lost, bool)
        assert_type(attempt.result, Any)
        attempt.result = 5
    with idem.attempt("k", returns=list[int]) as typed:
        assert_type(typed, Attempt[list[int]])
        assert_type(typed.result, list[int])
        typed.result = [5]
        typed.result = "5"  # type: ignore[assignment]
    with Idempotency("memory://", hooks=[print], scopes={"a": Policy()}) as opened:
        assert_type(opened, Idempotency)

    idem.execute(5, count)  # type: ignore[arg-type]
    idem.execute("k")  # type: ignore[call-arg]
    idem.execute("k", 5)  # type: ignore[arg-type]
    idem.execute("k", count, ttl=5)  # type: ignore[call-arg]
    idem.execute("k", count, policy="payment")  # type: ignore[arg-type]
    idem.execute("k", needs_an_argument)  # type: ignore[arg-type]
    Idempotency("memory://", cache="many")  # type: ignore[arg-type]
    Idempotency("memory://", polcy=Policy())  # type: ignore[call-arg]


def needs_an_argument(order: int) -> int:
    return order


async def of_asyncio(idem: AsyncIdempotency) -> None:
    assert_type(await idem.execute("k", count_async), int)
    assert_type(await idem.run("k", count_async), Outcome[int])
    assert_type(await idem.consume("k", count_async), bool)
    assert_type(await idem.peek("k"), Record | None)
    assert_type(await idem.forget("k"), bool)
    async with idem.attempt("k") as attempt:
        assert_type(attempt, Attempt)
    async with idem.attempt("k", returns=str) as typed:
        assert_type(typed.result, str)
    async with AsyncIdempotency("memory://") as opened:
        assert_type(opened, AsyncIdempotency)

    await idem.execute("k", count)  # type: ignore[arg-type]
    with idem.attempt("k"):  # type: ignore[attr-defined]
        pass


def of_marks(marks: Marks) -> None:
    assert_type(marks.check("k"), bool)
    assert_type(marks.set("k", ttl=5), bool)
    assert_type(marks.set_result("k", [1]), bool)
    assert_type(marks.do("k", count), bool)
    assert_type(marks.delete("k"), bool)
    assert_type(marks.exists("k"), bool)
    assert_type(marks.ttl("k"), float | None)
    assert_type(marks.refresh("k"), bool)
    assert_type(marks.clear("a:"), int)
    assert_type(marks.check_many(["a"]), dict[str, bool])
    assert_type(marks.set_many({"a"}), dict[str, bool])
    assert_type(marks.get_result_many(["a"]), dict[str, object])
    assert_type(marks.delete_many(["a"]), dict[str, bool])

    marks.set("k", "value")  # type: ignore[call-arg, arg-type]


def of_the_module() -> None:
    assert_type(semel.configure("memory://"), Idempotency)
    assert_type(semel.execute("k", count), int)
    assert_type(semel.run("k", count), Outcome[int])
    assert_type(semel.consume("k", count), bool)
    assert_type(semel.marks.check("k"), bool)
    assert_type(semel.current_attempt(), Attempt | None)
    assert_type(semel.new_key("shop"), str)
    with semel.attempt("k") as attempt:
        assert_type(attempt, Attempt)
    with semel.attempt("k", returns=int) as typed:
        assert_type(typed.result, int)
    semel.configure("memory://", policy=Policy.payment(), cache=5)
    semel.configure("memory://", polcy=Policy())  # type: ignore[call-arg]
    semel.configure("memory://", cache="many")  # type: ignore[arg-type]


semel.exectue  # type: ignore[attr-defined]  # noqa: B018 - a name that is not there


def judge(error: BaseException) -> Failure:
    return "final"


def of_policies() -> None:
    Policy(
        duplicate="reject",
        concurrent="wait",
        failure="final",
        abandoned="hold",
        mismatch="replace",
        store_error="open",
        ttl=timedelta(days=1),
        failed_ttl=300,
        lease=30.0,
        wait_timeout=None,
        max_attempts=3,
        max_result_bytes=1024,
        codec="msgpack",
        message="please wait",
        not_done=(ConnectionRefusedError,),
        payload_required=True,
    )
    Policy(failure=judge)
    assert_type(Policy.payment(), Policy)
    assert_type(Policy.preset("http"), Policy)
    assert_type(Policy.preset("http", ttl=5, max_attempts=None), Policy)
    assert_type(Policy.http(ttl=timedelta(minutes=5), codec="msgpack"), Policy)
    assert_type(Policy.messages(message="please wait"), Policy)
    assert_type(Policy.job(failure=judge), Policy)
    assert_type(Policy.payment(not_done=(ConnectionRefusedError,), lease=60), Policy)
    assert_type(Policy.coupon(duplicate="reject"), Policy)

    Policy.preset("http", nonsense=3)  # type: ignore[call-arg]
    Policy.http(nonsense=3)  # type: ignore[call-arg]
    Policy.messages(nonsense=3)  # type: ignore[call-arg]
    Policy.job(nonsense=3)  # type: ignore[call-arg]
    Policy.payment(nonsense=3)  # type: ignore[call-arg]
    Policy.coupon(nonsense=3)  # type: ignore[call-arg]
    Policy.payment(ttl="3d")  # type: ignore[arg-type]
    Policy.coupon(duplicate="ignore")  # type: ignore[arg-type]

    Policy(duplicate="ignore")  # type: ignore[arg-type]
    Policy(ttl="1h")  # type: ignore[arg-type]
    Policy(retention=5)  # type: ignore[call-arg]
    Policy(5)  # type: ignore[call-arg, arg-type]
    Policy().ttl = 5  # type: ignore[misc]
    hook: Callable[[semel.Event], object] = print
    Idempotency("memory://", hooks=[hook])
