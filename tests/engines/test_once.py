"""`once` on functions and methods, for both engines: keys, payloads, and what a wrong use says."""

from __future__ import annotations

import asyncio
import functools
import inspect
from dataclasses import dataclass
from decimal import Decimal

import pytest

from semel import AsyncIdempotency, ConfigError, Idempotency, InvalidKey, PayloadMismatch, Policy
from semel.core.records import Identity
from semel.errors import DuplicateRequest, SerializationError


@dataclass(frozen=True)
class Order:
    id: str
    amount: int = 1


class Shop:
    """Functions to decorate, counting their runs."""

    def __init__(self, world) -> None:
        self.world = world
        self.idem = world.engine().engine
        self.runs = []

    def kindly(self, fn):
        """The function itself, or the async one that does the same."""
        if self.world.name == "threads":
            return fn

        @functools.wraps(fn)
        async def awaited(*args, **kwargs):
            return fn(*args, **kwargs)

        return awaited

    def once(self, *args, **kwargs):
        """`idem.once`, decorating a plain function as the engine's kind needs it."""
        decorate = self.idem.once(*args, **kwargs)
        return lambda fn: decorate(self.kindly(fn))

    def call(self, once, /, *args, **kwargs):
        return self.world.kind.finish(once, *args, **kwargs)

    def stored(self) -> list[tuple[str, str]]:
        """Which records there are."""
        page = self.world.kind.finish(self.idem.internals.store.store.scan)
        return sorted((record.identity.scope, record.identity.key) for record in page.records)


@pytest.fixture
def shop(memory_world) -> Shop:
    return Shop(memory_world)


# --- keys ----------------------------------------------------------------------------------


def test_each_call_runs_once_per_key_and_duplicates_get_the_first_result(shop):
    @shop.once(key="order:{order.id}", scope="orders.create")
    def create(order):
        shop.runs.append(order)
        return {"order": order.id, "run": len(shop.runs)}

    assert shop.call(create, Order("a")) == {"order": "a", "run": 1}
    assert shop.call(create, order=Order("a")) == {"order": "a", "run": 1}
    assert shop.call(create, Order("b")) == {"order": "b", "run": 2}
    assert shop.stored() == [("orders.create", "order:a"), ("orders.create", "order:b")]


def test_a_template_may_come_first(shop):
    @shop.once("order:{order_id}")
    def create(order_id):
        return order_id

    assert shop.call(create, 7) == 7
    assert create.key_for(7) == "order:7"
    assert shop.stored() == [(create.scope, "order:7")]


def test_a_callable_key_gets_the_arguments_as_they_came(shop):
    @shop.once(key=lambda order, *rest, **more: f"{order.id}-{len(rest)}-{min(more)}")
    def create(order, *rest, **more):
        return order.id

    assert shop.call(create, Order("a"), 1, 2, urgent=True) == "a"
    assert create.key_for(Order("a"), 1, 2, urgent=True) == "a-2-urgent"


def test_without_a_key_the_arguments_make_it_however_they_are_passed(shop):
    @shop.once()
    def f(a, b=2, *, c=3):
        shop.runs.append((a, b, c))
        return a

    keys = {f.key_for(1), f.key_for(a=1), f.key_for(1, 2), f.key_for(1, b=2, c=3)}
    assert len(keys) == 1
    assert keys.pop().startswith("args-")
    assert len({f.key_for(1), f.key_for(2), f.key_for(1, 3), f.key_for(1, c=4)}) == 4
    for call in (lambda: shop.call(f, 1), lambda: shop.call(f, a=1), lambda: shop.call(f, 1, b=2)):
        assert call() == 1
    assert shop.runs == [(1, 2, 3)]


def test_bare_once_decorates_too(shop):
    @shop.idem.once
    @shop.kindly
    def f(a):
        shop.runs.append(a)
        return a

    assert [shop.call(f, 1), shop.call(f, 1), shop.call(f, 2)] == [1, 1, 2]
    assert shop.runs == [1, 2]


def test_the_scope_is_module_and_qualified_name(shop):
    @shop.once("{a}")
    def f(a):
        return a

    shop.call(f, 1)
    ((scope, key),) = shop.stored()
    assert scope == f"{__name__}.{f.__qualname__}"
    assert key == "1"


def test_two_functions_with_the_same_key_are_two_operations(shop):
    @shop.once("{a}")
    def first(a):
        return "first"

    @shop.once("{a}")
    def second(a):
        return "second"

    assert (shop.call(first, 1), shop.call(second, 1)) == ("first", "second")


@pytest.mark.parametrize("key", [lambda a: 5, lambda a: "", lambda a: "x" * 256, lambda a: None])
def test_a_callable_that_makes_no_key_is_an_error_before_anything_runs(shop, key):
    @shop.once(key=key)
    def f(a):
        shop.runs.append(a)

    with pytest.raises(InvalidKey):
        shop.call(f, 1)
    assert (shop.runs, shop.stored()) == ([], [])


def test_a_callable_that_fails_is_an_error_and_no_silent_fallback(shop):
    @shop.once(key=lambda a: a["id"])
    def f(a):
        shop.runs.append(a)

    with pytest.raises(KeyError):
        shop.call(f, {})
    assert (shop.runs, shop.stored()) == ([], [])


def test_a_template_that_finds_nothing_is_an_error_before_anything_runs(shop):
    @shop.once("{order.number}")
    def f(order):
        shop.runs.append(order)

    with pytest.raises(InvalidKey, match=r"\.f: the key needs {order\.number}, but"):
        shop.call(f, Order("a"))
    assert (shop.runs, shop.stored()) == ([], [])


def test_arguments_without_a_canonical_form_make_no_key(shop):
    @shop.once()
    def f(a):
        shop.runs.append(a)

    with pytest.raises(SerializationError, match="no canonical form"):
        shop.call(f, object())
    assert (shop.runs, shop.stored()) == ([], [])


# --- payloads ------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ["order", ["order"], ("order",), lambda order, note: order])
def test_another_payload_under_the_same_key_is_refused(shop, payload):
    @shop.once("{order.id}", payload=payload)
    def create(order, note):
        shop.runs.append(order)
        return order.amount

    assert shop.call(create, Order("a", 1), "first") == 1
    assert shop.call(create, Order("a", 1), note="again") == 1
    with pytest.raises(PayloadMismatch):
        shop.call(create, Order("a", 2), "first")
    assert len(shop.runs) == 1


def test_several_arguments_make_one_payload(shop):
    @shop.once("{id}", payload=("amount", "currency"))
    def pay(id, amount, currency="EUR", note=""):  # noqa: A002 - the user's own name
        return amount

    assert shop.call(pay, 1, 5) == shop.call(pay, 1, 5, "EUR", note="x") == 5
    with pytest.raises(PayloadMismatch):
        shop.call(pay, 1, 5, "USD")
    with pytest.raises(PayloadMismatch):
        shop.call(pay, 1, 6)


def test_a_payload_that_cannot_be_compared_is_an_error_before_anything_runs(shop):
    @shop.once("{id}", payload="thing")
    def f(id, thing):  # noqa: A002 - the user's own name
        shop.runs.append(id)

    with pytest.raises(SerializationError, match="no canonical form"):
        shop.call(f, 1, object())
    assert (shop.runs, shop.stored()) == ([], [])


def test_every_argument_that_the_key_leaves_out_is_compared(shop):
    @shop.once("invoice:{order_id}")
    def invoice(order_id, total, *, note="", **further):
        shop.runs.append(order_id)
        return total

    assert shop.call(invoice, 1, 5) == shop.call(invoice, order_id=1, total=5, note="") == 5
    for other in ({"total": 600}, {"total": 5, "note": "x"}, {"total": 5, "x": 1}, {"total": 5.0}):
        with pytest.raises(PayloadMismatch):
            shop.call(invoice, 1, **other)
    assert shop.runs == [1]
    assert shop.call(invoice, 2, 600) == 600


@pytest.mark.parametrize("template", ["{order.id}", "{order[0]}", "{order:.0f}"])
def test_an_argument_is_compared_unless_its_whole_value_is_in_the_key(shop, template):
    @shop.once(template)
    def create(order):
        return str(order)

    pairs = {
        "{order.id}": (Order("a", 1), Order("a", 2)),
        "{order[0]}": (["a", 1], ["a", 2]),
        "{order:.0f}": (Decimal("1.1"), Decimal("1.2")),
    }
    one, other = pairs[template]
    shop.call(create, one)
    assert shop.call(create.run, one).replayed
    with pytest.raises(PayloadMismatch):
        shop.call(create, other)


def test_a_key_function_leaves_all_arguments_to_be_compared(shop):
    @shop.once(key=lambda order_id, total: f"invoice:{order_id}")
    def invoice(order_id, total):
        return total

    shop.call(invoice, 1, 5)
    for other in ((1, 600), ("1", 5)):
        with pytest.raises(PayloadMismatch):
            shop.call(invoice, *other)


def test_a_new_argument_with_a_default_changes_no_call_that_was_made_before(shop):
    @shop.once("{id}", scope="pay")
    def before(id, amount):  # noqa: A002 - the user's own name
        return amount

    @shop.once("{id}", scope="pay")
    def after(id, amount, currency="EUR", *more, **further):  # noqa: A002
        return amount

    shop.call(before, 1, 5)
    assert shop.call(after.run, 1, 5).replayed
    with pytest.raises(PayloadMismatch):
        shop.call(after, 1, 5, "USD")


def test_the_instance_and_the_class_are_never_compared(shop):
    class Till:
        def __init__(self, connection):
            self.connection = connection

        @shop.once("{order}", scope="pay")
        def pay(self, order, amount):
            return amount

        @classmethod
        @shop.once(key=lambda cls, order, amount: str(order), scope="open")
        def open(cls, order, amount):
            return amount

    for name in ("pay", "open"):
        assert shop.call(getattr(Till(object()), name), 1, 5) == 5
        assert shop.call(getattr(Till(object()), name).run, 1, 5).replayed
        with pytest.raises(PayloadMismatch):
            shop.call(getattr(Till(object()), name), 1, 6)


def test_an_argument_that_cannot_be_compared_is_named_at_the_first_call(shop):
    @shop.once("{order_id}")
    def pay(order_id, session):
        shop.runs.append(order_id)

    with pytest.raises(SerializationError) as refusal:
        shop.call(pay, 1, object())
    assert "payload['session']" in str(refusal.value)
    assert "payload=None" in str(refusal.value)
    assert refusal.value.key_digest == Identity(pay._plan.scope, "1").key_digest
    assert (shop.runs, shop.stored()) == ([], [])


def test_payload_none_compares_nothing(shop):
    @shop.once("{order_id}", payload=None)
    def pay(order_id, session):
        return order_id

    shop.call(pay, 1, object())
    assert shop.call(pay.run, 1, object()).replayed
    assert shop.call(pay.peek, 1, None).fingerprint is None


def test_a_payment_whose_arguments_are_compared_needs_no_payload(shop):
    @shop.once("{order_id}", policy=Policy.payment())
    def pay(order_id, amount):
        return amount

    shop.call(pay, 1, 5)
    with pytest.raises(PayloadMismatch):
        shop.call(pay, 1, 6)


# --- words of the decorator ----------------------------------------------------------------


def test_ttl_and_message_win_over_the_policy_beside_them(shop):
    @shop.once("{a}", ttl=50, message="once is enough", policy=Policy(ttl=9000, duplicate="reject"))
    def f(a):
        return a

    shop.call(f, 1)
    with pytest.raises(DuplicateRequest, match="once is enough"):
        shop.call(f, 1)
    assert 40 < shop.call(f.peek, 1).remaining <= 50


# --- beside the call -----------------------------------------------------------------------


def test_run_tells_whether_it_was_replayed(shop):
    @shop.once("{a}")
    def f(a):
        return a

    first, second = shop.call(f.run, 1), shop.call(f.run, a=1)
    assert (first.value, first.replayed) == (1, False)
    assert (second.value, second.replayed) == (1, True)
    assert second.attempt.key == "1"


def test_peek_reads_and_forget_lets_it_run_again(shop):
    @shop.once("{a}")
    def f(a):
        shop.runs.append(a)
        return a

    assert shop.call(f.peek, 1) is None
    assert shop.call(f.forget, 1) is False
    shop.call(f, 1)
    assert shop.call(f.peek, 1).number == 1
    assert shop.call(f.forget, a=1) is True
    shop.call(f, 1)
    assert shop.runs == [1, 1]


# --- methods -------------------------------------------------------------------------------


def make_till(shop, *, outside):
    """A class with each kind of method; `outside` says on which side of it `once` stands."""

    def both(wrap):
        def decorate(fn):
            once = shop.idem.once("{order}")
            return once(wrap(shop.kindly(fn))) if outside else wrap(once(shop.kindly(fn)))

        return decorate

    class Till:
        def __init__(self, name):
            self.name = name

        @shop.once("{self.name}:{order}")
        def pay(self, order, note=None):
            """Pay at this till."""
            shop.runs.append((self.name, order))
            return f"{self.name} {order}"

        @both(classmethod)
        def open(cls, order, note=None):  # noqa: N805 - `both` makes it a class method
            shop.runs.append((cls.__name__, order))
            return f"{cls.__name__} {order}"

        @both(staticmethod)
        def count(order, note=None):  # noqa: N805 - `both` makes it a static method
            shop.runs.append(("static", order))
            return f"static {order}"

    return Till


@pytest.fixture(params=[True, False], ids=["once outside", "once inside"])
def till(request, shop):
    return make_till(shop, outside=request.param)


def test_a_method_runs_once_per_key_of_its_instance(shop, till):
    one, two = till("one"), till("two")
    assert shop.call(one.pay, "a") == shop.call(one.pay, order="a") == "one a"
    assert shop.call(two.pay, "a") == "two a"
    assert shop.call(till.pay, one, "a") == "one a"
    assert shop.runs == [("one", "a"), ("two", "a")]


@pytest.mark.parametrize(("name", "result"), [("open", "Till a"), ("count", "static a")])
def test_class_and_static_methods_run_once_in_either_order_of_decorators(shop, till, name, result):
    assert shop.call(getattr(till, name), "a") == result
    assert shop.call(getattr(till("one"), name), order="a") == result
    assert len(shop.runs) == 1


@pytest.mark.parametrize("name", ["pay", "open", "count"])
def test_the_rest_of_the_api_is_bound_too(shop, till, name):
    method = getattr(till("one"), name)
    first = shop.call(method.run, "a")
    assert not first.replayed
    assert method.key_for("a") == ("one:a" if name == "pay" else "a")
    assert shop.call(method.peek, "a").number == 1
    assert shop.call(method.forget, order="a") is True
    assert not shop.call(method.run, "a").replayed
    assert len(shop.runs) == 2


@pytest.mark.parametrize("name", ["pay", "open", "count"])
def test_a_bound_method_shows_the_signature_a_caller_sees(till, name):
    method = getattr(till("one"), name)
    assert str(inspect.signature(method)) == "(order, note=None)"
    assert method.__name__ == name


def test_an_unbound_method_shows_self(till):
    assert str(inspect.signature(till.pay)) == "(self, order, note=None)"


def test_a_class_method_may_have_a_key_of_its_arguments(shop):
    class Till:
        @classmethod
        @shop.once()
        def inside(cls, order):
            shop.runs.append(order)
            return order

        @shop.idem.once
        @classmethod
        @shop.kindly
        def outside(kind, order):  # noqa: N804 - any name must do
            shop.runs.append(order)
            return order

    class Child(Till):
        pass

    assert Till.inside.key_for("a") == Till.inside.key_for("a")
    assert Till.inside.key_for("a") != Child.inside.key_for("a")  # which may make other things
    assert Till.outside.key_for("a") != Child.outside.key_for("a")
    for method in 2 * (Till.inside, Child.inside, Till.outside, Child.outside):
        assert shop.call(method, "a") == "a"
    assert shop.runs == ["a"] * 4


def test_an_inherited_method_is_bound_to_the_child(shop, till):
    class Child(till):
        pass

    assert shop.call(Child("one").pay, "b") == "one b"
    assert shop.call(Child.open, "b") == "Child b"


# --- what is kept of the function ----------------------------------------------------------


def test_name_docs_signature_and_attributes_are_kept(shop):
    def create(order: Order, *, note: str = "") -> str:
        """Create an order."""
        return order.id

    create.route = "/orders"
    decorated = shop.once("{order.id}")(create)
    assert decorated.__name__ == "create"
    assert decorated.__qualname__ == create.__qualname__
    assert decorated.__doc__ == "Create an order."
    assert decorated.__module__ == __name__
    assert decorated.__annotations__ == create.__annotations__
    assert decorated.route == "/orders"
    assert inspect.signature(decorated) == inspect.signature(create)


def test_frameworks_see_whether_it_is_a_coroutine_function(shop, till):
    @shop.once("{a}")
    def f(a):
        return a

    is_async = shop.world.name == "asyncio"
    for function in (f, till("one").pay, till.open, till.count):
        assert inspect.iscoroutinefunction(function) is is_async
        assert asyncio.iscoroutinefunction(function) is is_async
        assert inspect.iscoroutinefunction(function.__call__) is is_async


def test_the_annotated_type_makes_a_replay_equal_to_the_first_result(shop):
    @shop.once("{id}")
    def create(id: str, note: NotImportedHere = None) -> Order:  # noqa: A002, F821 - on purpose
        return Order(id, 3)

    assert create._plan.returns is Order
    assert shop.call(create, "a") == shop.call(create, "a") == Order("a", 3)


# --- wrong calls ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"b": 2}), ((1,), {"a": 1})]
)
@pytest.mark.parametrize("key", [None, "{a}", lambda *args, **kwargs: "k"])
def test_a_wrong_call_is_a_type_error_before_anything_is_claimed(shop, key, args, kwargs):
    @shop.once(key=key)
    def f(a):
        shop.runs.append(a)

    for method in (f, f.run, f.peek, f.forget):
        with pytest.raises(TypeError, match=r"f\(\) "):
            shop.call(method, *args, **kwargs)
    assert (shop.runs, shop.stored()) == ([], [])


# --- wrong decorations ---------------------------------------------------------------------


def plain(a, b=1):
    return a


async def coroutine(a, b=1):
    return a


def generator(a):
    yield a


async def async_generator(a):
    yield a


class Callable:
    def __call__(self, a):
        return a


class AsyncCallable:
    async def __call__(self, a):
        return a


class Method:
    def pay(self, a):
        return a


ENGINES = {
    "threads": (Idempotency, plain, coroutine),
    "asyncio": (AsyncIdempotency, coroutine, plain),
}


@pytest.fixture
def engine(kind):
    return ENGINES[kind][0]("memory://")


@pytest.fixture
def fit(kind):
    """A function that the engine can decorate."""
    return ENGINES[kind][1]


@pytest.fixture
def unfit(kind):
    return ENGINES[kind][2]


def test_the_other_kind_of_function_is_refused_with_the_engine_to_take(engine, unfit):
    other = "AsyncIdempotency" if isinstance(engine, Idempotency) else "an Idempotency"
    with pytest.raises(ConfigError, match=f"decorate it with .*{other}"):
        engine.once(unfit)


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_is_refused(engine, function):
    with pytest.raises(ConfigError, match="is a generator: its result cannot be replayed"):
        engine.once(function)


@pytest.mark.parametrize("thing", [5, object(), Order])
def test_what_is_no_function_is_refused(engine, thing):
    with pytest.raises(ConfigError, match="once decorates functions, not"):
        engine.once()(thing)


async def awaited(a, b=2):
    return f"{a}-{b}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "{c}"}, "there is no argument 'c'; there are: a, b"),
        ({"key": "order"}, "has no {field}"),
        ({"key": ""}, "has no {field}"),
        ({"key": "{a"}, "the key template '{a' is wrong"),
        ({"key": "{a.__class__}"}, "private name"),
        ({"key": 5}, "key must be a template, a callable or None, not int"),
        ({"key": awaited}, "key must be a plain function"),
        ({"payload": awaited}, "payload must be a plain function"),
        ({"payload": "c"}, "payload must name arguments of the function (a, b); got 'c'"),
        ({"payload": ["a", "c"]}, "payload must name arguments"),
        ({"payload": []}, "payload must name arguments"),
        ({"payload": 5}, "payload must name arguments"),
        ({"payload": [5]}, "payload must name arguments"),
        ({"policy": Policy.payment()}, "name the arguments to compare, such as payload='order'"),
        (
            {"key": "{a}", "payload": None, "policy": Policy.payment()},
            "name the arguments to compare, such as payload='order'",
        ),
        ({"policy": {"ttl": 5}}, "policy must be a Policy, not dict"),
        ({"ttl": 0}, "ttl must be more than zero seconds"),
        ({"message": 5}, "message must be a string"),
        ({"scope": ""}, "the scope is empty"),
        ({"scope": "a b"}, "the scope (3 characters) has whitespace"),
        ({"scope": 5}, "the scope must be a str, not int"),
    ],
)
def test_a_wrong_decoration_is_refused_at_decoration(engine, fit, options, message):
    decorator = engine.once(**options)
    with pytest.raises(ConfigError) as refusal:
        decorator(fit)
    assert message in str(refusal.value)


def test_an_unknown_option_is_refused_at_once(engine):
    with pytest.raises(
        TypeError, match=r"^once\(\) got an unexpected keyword argument 'retention'"
    ):
        engine.once("{a}", retention=5)


def test_two_keys_are_refused(engine):
    with pytest.raises(ConfigError, match="two keys: the template and key="):
        engine.once("{a}", key="{b}")


def test_a_callable_in_the_place_of_the_template_is_explained(engine):
    with pytest.raises(ConfigError, match="is passed as key="):
        engine.once(lambda a: "k", scope="orders")
    with pytest.raises(ConfigError, match="is passed as key="):
        engine.once(lambda a: "k", key="{a}")


def test_a_method_needs_to_be_told_its_key(shop):
    with pytest.raises(ConfigError, match="name what makes its key"):
        shop.once()(Method.pay)


def test_functions_without_a_name_of_their_own_need_a_scope(shop):
    # Two of them would share a scope, and one would be answered with the other's results.
    for nameless in (lambda a: a, functools.partial(plain, b=2), Callable()):
        fit = nameless if shop.world.name == "threads" else as_async(nameless)
        with pytest.raises(ConfigError, match="has no name of its own: pass scope="):
            shop.idem.once()(fit)
        decorated = shop.idem.once(scope="named")(fit)
        assert shop.call(decorated, 1) == 1
        shop.call(decorated.forget, 1)


def as_async(nameless):
    if isinstance(nameless, functools.partial):
        return functools.partial(coroutine, b=2)
    if isinstance(nameless, Callable):
        return AsyncCallable()

    async def twin(a):
        return nameless(a)

    twin.__qualname__ = nameless.__qualname__
    return twin


def test_an_object_is_as_async_as_its_call(kind, engine):
    unfit = AsyncCallable() if kind == "threads" else Callable()
    with pytest.raises(ConfigError, match="decorate it with"):
        engine.once(scope="named")(unfit)


def test_a_function_whose_parameters_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        Idempotency("memory://").once(scope="named")(max)
