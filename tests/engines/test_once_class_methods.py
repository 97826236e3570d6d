"""`classmethod` around `once`: the same on every Python, in every kind of class."""

from __future__ import annotations

import abc
import enum
import inspect
from dataclasses import dataclass

import msgspec
import pydantic
import pytest

from semel import Idempotency

idem = Idempotency("memory://")


def by_class(cls, order):
    return f"{cls.__name__}:{order}"


class Plain:
    pass


class Immutable(type):
    def __setattr__(cls, name, value):
        raise AttributeError(f"{cls.__name__} is as it is")

    def __delattr__(cls, name):
        raise AttributeError(f"{cls.__name__} is as it is")


def of_a_class(base, **options):
    class Till(base, **options):
        @classmethod
        @idem.once(key=by_class, scope="tills")
        def open(cls, order):
            return f"{cls.__name__} {order}"

    return Till


def of_a_dataclass_with_slots():
    @dataclass(slots=True)
    class Till:
        name: str = "one"

        @classmethod
        @idem.once(key=by_class, scope="tills")
        def open(cls, order):
            return f"{cls.__name__} {order}"

    return Till


KINDS = {
    "plain": lambda: of_a_class(Plain),
    "abstract": lambda: of_a_class(abc.ABC),
    "enum": lambda: of_a_class(enum.Enum),
    "immutable": lambda: of_a_class(Plain, metaclass=Immutable),
    "pydantic": lambda: of_a_class(pydantic.BaseModel),
    "msgspec": lambda: of_a_class(msgspec.Struct),
    "dataclass": of_a_dataclass_with_slots,
}


@pytest.fixture(params=KINDS)
def till(request):
    yield KINDS[request.param]()
    for record in idem.records():
        idem.forget(record.identity.key, scope=record.identity.scope)


def test_everything_is_bound_to_the_class(till):
    assert till.open.key_for(5) == "Till:5"
    assert not till.open.run(5).replayed
    assert till.open(5) == "Till 5"
    assert till.open.peek(order=5).number == 1
    assert till.open.forget(5) is True
    assert str(inspect.signature(till.open)) == "(order)"


def test_it_stays_a_class_method_and_leaves_nothing_else_in_the_class(till):
    assert isinstance(vars(till)["open"], classmethod)
    assert not [name for name in dir(till) if "semel" in name]


def test_a_child_is_bound_to_itself():
    class Child(of_a_class(Plain)):
        @classmethod
        def open(cls, order):
            return f"child of {super().open(order)}"

    class Grandchild(of_a_class(Plain)):
        pass

    assert Child.open(5) == "child of Child 5"
    assert Grandchild.open.key_for(5) == Grandchild().open.key_for(5) == "Grandchild:5"


def test_classes_in_classes_do_not_mix():
    class Outer:
        @classmethod
        @idem.once("{order}")
        def first(cls, order):
            return cls.__name__

        class Inner:
            @classmethod
            @idem.once("{order}")
            def open(cls, order):
                return cls.__name__

        @classmethod
        @idem.once("{order}")
        def last(cls, order):
            return cls.__name__

    assert [Outer.first.run(1).value, Outer.last.run(1).value] == ["Outer", "Outer"]
    assert Outer.Inner.open.run(1).value == "Inner"


def test_a_class_method_around_anything_else_is_left_alone():
    class Till:
        @idem.once("{order}")
        def pay(self, order):
            return order

        @classmethod
        def name(cls):
            return cls.__name__

    assert type(vars(Till)["name"]) is classmethod
    assert Till.name() == "Till"


def test_a_method_may_be_decorated_when_its_class_is_long_made():
    class Till:
        def pay(self, order):
            return order

    Till.pay = idem.once("{order}")(Till.pay)
    assert Till().pay(5) == 5
    assert not [name for name in dir(Till) if "semel" in name]
