from __future__ import annotations

import enum
import uuid
from collections import UserDict
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.keys import Arguments, compile_template
from semel.errors import ConfigError, InvalidKey


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Size(enum.IntEnum):
    LARGE = 3


@dataclass
class Order:
    id: object

    @property
    def broken(self):
        raise ZeroDivisionError("secret value")

    @property
    def interrupted(self):
        raise KeyboardInterrupt

    def total(self):
        return 1


def render(text, **values):
    return compile_template(text, tuple(values)).render(values.__getitem__)


@pytest.mark.parametrize(
    ("text", "values", "key"),
    [
        ("order:{order.id}", {"order": Order(42)}, "order:42"),
        ("order:{order.id}", {"order": {"id": 42}}, "order:42"),
        ("{order.id}", {"order": UserDict(id=42)}, "42"),
        ("{user[id]}", {"user": {"id": "u1"}}, "u1"),
        ("{items[0]}", {"items": ["x", "y"]}, "x"),
        ("{order.id.lines[1].sku}", {"order": Order({"lines": [0, {"sku": "S"}]})}, "S"),
        ("{{{a}}}", {"a": 1}, "{1}"),
        ("{a}{{:}}{b}", {"a": 1, "b": 2}, "1{:}2"),
        ("{day:%Y-%m-%d}", {"day": datetime(2024, 5, 6, 7, 8, tzinfo=UTC)}, "2024-05-06"),
        ("{n:05d}", {"n": 42}, "00042"),
        ("{a}:{a}", {"a": 1}, "1:1"),
    ],
)
def test_a_template_reads_attributes_and_items(text, values, key):
    assert render(text, **values) == key


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (0, "0"),
        (False, "False"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.50"),
        (Colour.RED, "red"),
        (Size.LARGE, "3"),
        (date(2024, 5, 6), "2024-05-06"),
        (datetime(2024, 5, 6, 7, 8, tzinfo=UTC), "2024-05-06T07:08:00+00:00"),
    ],
)
def test_values_with_a_stable_text_make_keys(value, text):
    assert render("{a}", a=value) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("order:{other.id}", "there is no argument 'other'; there are: order, user"),
        ("{_order}", "private name"),
        ("{order.__class__}", "private name"),
        ("{order.id._x.y}", "private name"),
        ("{order[_secret]}", "private name"),
        ("order:{}", "is not the name of an argument"),
        ("order:{0}", "is not the name of an argument"),
        ("{order.}", "is not the name of an argument"),
        ("{order[]}", "is not the name of an argument"),
        ("{order id}", "is not the name of an argument"),
        ("{order!r}", "conversions such as !r"),
        ("{order:{user}}", "a field of its own"),
        ("{order", "expected '}'"),
        ("order}", "encountered in format string"),
        ("order", "every call would have the same key"),
        ("{{order}}", "every call would have the same key"),
        ("", "every call would have the same key"),
        ("{order}{user}", "there must be a separator"),
        ("{order}and{user}", "there must be a separator"),
        ("{order}%{user}", "there must be a separator"),
        ("my order {order}", "keys hold no whitespace"),
        ("{order}\n", "keys hold no whitespace"),
    ],
)
def test_a_wrong_template_is_refused_at_decoration(text, reason):
    with pytest.raises(ConfigError) as refused:
        compile_template(text, ("order", "user"))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        (
            "{a.missing}",
            Order(1),
            "the key needs {a.missing}, but reading it raised AttributeError",
        ),
        ("{a.missing}", {}, "reading it raised KeyError"),
        ("{a[9]}", [1], "reading it raised IndexError"),
        ("{a[x]}", [1], "reading it raised TypeError"),
        ("{a.broken}", Order(1), "reading it raised ZeroDivisionError"),
        ("{a.id}", Order(None), "the key needs {a.id}, which is None"),
        ("{a.id}", Order(""), "the key needs {a.id}, which is empty"),
        ("{a}", Order(1), "{a} is of type Order, which has no stable text"),
        ("{a.total}", Order(1), "{a.total} is of type method, which has no stable text"),
        ("{a}", 1.5, "of type float, which has no stable text"),
        ("{a:.2f}", 1.5, "of type float, which has no stable text"),
        ("{a}", b"x", "of type bytes, which has no stable text"),
        ("{a}", Colour.PAIR, "of type tuple, which has no stable text"),
        ("{a:%Y}", uuid.UUID(int=1), "of type UUID and cannot be written with the format '%Y'"),
        ("{a:d}", "text", "of type str and cannot be written with the format 'd'"),
        ("{a:%Z}", date(2024, 5, 6), "the key needs {a}, which is empty"),
        pytest.param("{a}", 10**5000, "of type int and cannot be written", id="huge"),
    ],
)
def test_a_value_that_makes_no_key_is_refused_before_anything_runs(text, value, reason):
    with pytest.raises(InvalidKey) as refused:
        render(text, a=value)
    assert reason in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_error_of_a_property_is_kept_as_the_cause():
    with pytest.raises(InvalidKey) as refused:
        render("{a.broken}", a=Order(1))
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_an_interrupt_inside_a_property_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        render("{a.interrupted}", a=Order(1))


def test_with_one_field_nothing_is_escaped():
    assert render("order:{a}", a="x:y%z") == "order:x:y%z"


def test_with_two_fields_separators_inside_values_are_escaped():
    assert render("order:{a}:{b}", a="x:y", b="5%") == "order:x%3Ay:5%25"
    assert render("{a}→{b}", a="x→y", b="-") == "x%E2%86%92y→-"
    assert render("tenant-{a}:{b}", a="x-y", b="z") == "tenant-x-y:z"


tricky = st.text("ab:-.%3A→0", min_size=1, max_size=5)


@pytest.mark.parametrize(
    "text", ["{a}:{b}:{c}", "x{a}:b{b}-a{c}%", "{a}a:3{b}::{c}", "{a}%:{b}A-{c}", "3{a}→{b}.{c}A"]
)
@given(one=st.tuples(tricky, tricky, tricky), two=st.tuples(tricky, tricky, tricky))
def test_different_values_never_make_the_same_key(text, one, two):
    template = compile_template(text, ("a", "b", "c"))
    keys = [template.render(dict(zip("abc", v, strict=True)).__getitem__) for v in (one, two)]
    assert (keys[0] == keys[1]) == (one == two)


def test_a_template_reads_a_call_however_it_is_written():
    def create(tenant, order, *, day=date(2024, 1, 2)):
        raise AssertionError("a template never calls the function")

    arguments = Arguments.of(create)
    template = compile_template("{tenant}/{order.id}/{day}", arguments.names)

    def key(args, kwargs):
        return template.render(arguments.mapping(args, kwargs).__getitem__)

    assert key(("t", Order(7)), {}) == "t/7/2024-01-02"
    assert key(("t",), {"order": Order(7), "day": date(2024, 1, 3)}) == "t/7/2024-01-03"
    with pytest.raises(TypeError, match="missing a required argument: 'order'"):
        key(("t",), {})
