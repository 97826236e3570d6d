from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.keys import Arguments, digest_key
from semel.errors import ConfigError, SerializationError


@dataclass
class Note:
    text: str = ""
    amount: int = field(default=0, compare=False)


def plain(a, b=2, *, c=3):
    return a, b, c


def positional_only(a, b=2, /, c=3):
    return a, b, c


def starred(a, *args, b=2, **kwargs):
    return a, args, b, kwargs


def needs_keyword(*, a):
    return a


class Shop:
    def order(self, item, amount=1):
        return item, amount

    def loose(*args):
        return args


FUNCTIONS = [plain, positional_only, starred, needs_keyword]
names = st.sampled_from(["a", "b", "c", "d"])
calls = st.tuples(
    st.lists(st.integers(), max_size=4).map(tuple), st.dictionaries(names, st.integers())
)


@given(st.sampled_from(FUNCTIONS), calls)
def test_any_call_binds_as_python_itself_binds_it(function, call):
    args, kwargs = call
    arguments = Arguments.of(function)
    try:
        function(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            arguments.mapping(args, kwargs)
        return
    expected = inspect.signature(function).bind(*args, **kwargs)
    expected.apply_defaults()
    assert list(arguments.mapping(args, kwargs).items()) == list(expected.arguments.items())


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((), {"a": 1}),
        ((1, 2), {}),
        ((1,), {"b": 2}),
        ((1,), {"c": 3}),
        ((), {"c": 3, "b": 2, "a": 1}),
    ],
)
def test_the_same_call_in_other_words_has_the_same_digest(args, kwargs):
    arguments = Arguments.of(plain)
    same = digest_key(arguments.mapping((1,), {}))
    assert digest_key(arguments.mapping(args, kwargs)) == same
    assert digest_key(arguments.mapping((2,), {})) != same


def test_a_digest_key_can_be_told_from_other_keys():
    prefix, _, digest = digest_key({"a": 1}).partition("-")
    assert prefix == "args"
    assert len(bytes.fromhex(digest)) == 16


def test_arguments_without_a_digest_are_an_error():
    with pytest.raises(SerializationError):
        digest_key({"a": object()})


def test_starred_arguments_are_read_whole():
    arguments = Arguments.of(starred)
    values = arguments.mapping((1, 2, 3), {"x": 4})
    assert values["args"] == (2, 3)
    assert values["kwargs"] == {"x": 4}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"plain\(\) missing a required argument: 'a'"),
        ((1, 2, 3), {}, r"plain\(\) too many positional arguments"),
        ((1,), {"a": 1}, r"plain\(\) multiple values for argument 'a'"),
        ((1,), {"d": 1}, r"plain\(\) got an unexpected keyword argument 'd'"),
    ],
)
def test_a_wrong_call_is_the_type_error_it_would_be_without_us(args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        Arguments.of(plain).mapping(args, kwargs)


def test_callables_without_a_readable_signature_are_a_config_error():
    with pytest.raises(ConfigError, match="the parameters of type cannot be read"):
        Arguments.of(type)


def test_partial_functions_and_bound_methods_are_read_by_what_is_left():
    assert Arguments.of(functools.partial(plain, 1)).mapping((2,), {}) == {"b": 2, "c": 3}
    assert Arguments.of(Shop().order).names == ("item", "amount")


ODD = object()


@pytest.mark.parametrize(
    ("default", "same", "others"),
    [
        ((1,), (1,), [(True,), (1.0,), [1]]),
        (Note(), Note(), [Note(amount=99)]),
        (ODD, ODD, [object()]),
    ],
    ids=["equal by value", "a field without a comparison", "nothing to compare"],
)
def test_only_what_has_the_same_fingerprint_is_at_its_default(default, same, others):
    def f(a=default):
        return a

    arguments = Arguments.of(f)
    assert arguments.without_defaults({"a": same}) == {}
    assert [arguments.without_defaults({"a": each}) for each in others] == [
        {"a": each} for each in others
    ]
