"""Layers of settings: what one source says, read and checked.

This module reads sources and collects what is wrong with them; it never stops at the first
problem, and it decides nothing about precedence. A URL is never shown: it may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec import UNSET
from msgspec.structs import asdict

from semel.core.keys import KeyRules
from semel.core.policy import DAY, HOUR, MINUTE, POSITIVE, Policy
from semel.errors import ConfigError, IdempotencyError

Check: TypeAlias = Callable[[object], object]
"""Gives a value in its stored form, or raises ConfigError."""

VARIABLE_PREFIX = "SEMEL_"

POLICY_NAMES = tuple(name for name in Policy.__struct_fields__ if name != "not_done")
"""The policy fields that can be written as text; `not_done` holds classes."""

_DURATIONS = (*POSITIVE, "wait_timeout")
_WHOLE_NUMBERS = ("max_attempts", "max_result_bytes", "max_waiting")
_SWITCHES = ("disabled", "payload_required")
_MAY_BE_NONE = ("wait_timeout", "max_attempts")

_UNITS = {"ms": 0.001, "s": 1.0, "m": MINUTE, "h": HOUR, "d": DAY}
_DURATION = re.compile(rf"(-?\d+(?:\.\d+)?)({'|'.join(_UNITS)})?", re.ASCII)

_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")

PRESETS: dict[str, dict[str, Any]] = {
    "default": {"url": "sqlite:///semel.db"},
    "development": {"url": "sqlite:///semel-dev.db", "policy": {"ttl": HOUR}},
    "test": {"url": "memory://", "policy": {"ttl": 5 * MINUTE}},
    "production": {},  # a URL must be given: production never guesses where records are kept
}
"""The settings presets; each is the lowest layer, written like a file."""

_NOT_OURS = re.compile(r"SEMEL_(SERVICE|PORT)(_.*)?")
"""What Kubernetes tells every pod about a service that is called semel."""


class Layer(NamedTuple):
    """What one source says, checked; names that it leaves out are not in it."""

    top: dict[str, Any]
    policy: dict[str, Any]
    scopes: dict[str, dict[str, Any]]
    sources: dict[str, str]
    """Where each of `top` is said, for errors."""

    @classmethod
    def empty(cls) -> Layer:
        """Begin a layer that says nothing yet."""
        return cls({}, {}, {}, {})


class LayerReader:
    """Reads sources into layers; `problems` says what is wrong, each with its source."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def file(self, path: Path, *, if_missing: str | None) -> Layer:
        """Read a TOML file; `if_missing` is the problem if it is not there, None if it may."""
        import tomllib  # noqa: PLC0415  only here: `import semel` must stay cheap

        table: dict[str, Any] = {}
        try:
            table = tomllib.loads(path.read_text("utf-8-sig"))  # editors of Windows write a BOM
        except FileNotFoundError:
            if if_missing is not None:
                self.problems.append(if_missing)
        except OSError as error:
            self.problems.append(f"{path.name}: cannot be read: {error.strerror}")
        except ValueError as error:  # not TOML (the error tells the line), or not UTF-8
            self.problems.append(f"{path.name}: is not valid TOML: {error}")
        return self.table(path.name, table)

    def variables(self, environ: Mapping[str, str]) -> Layer:
        """Read variables as `own_variables` gives them."""
        layer = Layer.empty()
        for variable, text in environ.items():
            name = variable.removeprefix(VARIABLE_PREFIX).lower()
            if name in _TOP_VARIABLES:
                self._keep(layer.top, _TOP, name, _from_text(name, text), variable)
                layer.sources[name] = variable
            elif name in POLICY_NAMES:
                self._keep(layer.policy, _POLICY, name, _from_text(name, text), variable)
            else:
                known = [f"{VARIABLE_PREFIX}{n.upper()}" for n in (*_TOP_VARIABLES, *POLICY_NAMES)]
                self._unknown(variable, variable, [*known, "SEMEL_ENV", "SEMEL_CONFIG"])
        return layer

    def table(self, source: str, table: Mapping[str, Any]) -> Layer:
        """Read the settings of a file, of a preset, or of the code."""
        layer = Layer.empty()
        for name, value in table.items():
            where = f"{source}: {name}"
            if name == "policy":
                layer.policy.update(self._policy(where, value))
            elif name == "scopes":
                layer.scopes.update(self._scopes(where, value))
            elif name in _TOP:
                self._keep(layer.top, _TOP, name, value, where)
                layer.sources[name] = where
            else:
                self._unknown(where, name, [*_TOP, "policy", "scopes"])
        return layer

    def _scopes(self, where: str, table: object) -> dict[str, dict[str, Any]]:
        scopes: dict[str, dict[str, Any]] = {}
        for scope, fields in self._entries(where, table):
            try:
                KeyRules().check_scope(scope)
            except IdempotencyError as error:
                self.problems.append(f"{where}: {error}")
            else:
                scopes[scope] = self._policy(f'{where}."{scope}"', fields)
        return scopes

    def _policy(self, where: str, table: object) -> dict[str, Any]:
        if isinstance(table, Policy):
            return _written(table)
        fields: dict[str, Any] = {"preset": {}}
        for name, value in self._entries(where, table):
            if name in _POLICY:
                self._keep(fields, _POLICY, name, value, f"{where}.{name}")
            elif isinstance(value, Mapping):  # the dot of [scopes.orders.create] made two tables
                hint = 'a scope with a dot is written in quotes, [scopes."orders.create"]'
                self.problems.append(f"{where}.{name}: is not known; {hint}")
            else:
                self._unknown(f"{where}.{name}", name, [*_POLICY])
        return {**fields.pop("preset"), **fields}

    def _entries(self, where: str, table: object) -> Collection[tuple[str, Any]]:
        if isinstance(table, Mapping):
            return table.items()
        self.problems.append(f"{where}: must be a table, not {type(table).__name__}")
        return ()

    def _keep(
        self,
        fields: dict[str, Any],
        checks: Mapping[str, Check],
        name: str,
        value: object,
        where: str,
    ) -> None:
        try:
            fields[name] = checks[name](value)
        except ConfigError as error:
            self.problems.append(f"{where}: {error}")

    def _unknown(self, where: str, name: str, known: Collection[str]) -> None:
        import difflib  # noqa: PLC0415  only for an error: `import semel` must stay cheap

        # Compared without the prefix, which would make all variables look alike.
        names = {each.removeprefix(VARIABLE_PREFIX): each for each in known}
        close = difflib.get_close_matches(name.removeprefix(VARIABLE_PREFIX), names, n=1)
        hint = f"did you mean {names[close[0]]}?" if close else f"known are: {', '.join(known)}"
        self.problems.append(f"{where}: is not known; {hint}")


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that are meant for semel; an empty one counts as not set."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(VARIABLE_PREFIX) and text != "" and not _NOT_OURS.fullmatch(name)
    }


def _from_text(name: str, text: str) -> object:
    """Turn a variable's text into what a file would hold; the check refuses what stays text."""
    if name in _SWITCHES:
        word = text.lower()
        return word in _YES if word in (*_YES, *_NO) else text
    if name in _WHOLE_NUMBERS and re.fullmatch("[0-9]{1,18}", text):
        return int(text)
    return text


# --- checks ------------------------------------------------------------------------------


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"must be a text, not {type(value).__name__}")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)


def _behind(value: object) -> str | None:
    # TOML has no null: an empty text takes back what a lower file says.
    return _text_or_none(value) or None


def _key_pattern(value: object) -> str | None:
    pattern = _text_or_none(value)
    KeyRules(pattern)
    return pattern


def _max_waiting(value: object) -> int | None:
    # TOML has no null, and a variable neither.
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError("must be a whole number of 0 or more, or none for no bound")
    return value


def _disabled(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false; a variable may say {', '.join((*_YES, *_NO))}")
    return value


def _preset(value: object) -> str:
    name = _text(value)
    if name not in PRESETS:
        raise ConfigError(f"must be one of {', '.join(PRESETS)}")
    return name


_TOP: dict[str, Check] = {
    "url": _text_or_none,
    "prefix": _text,
    "key_pattern": _key_pattern,
    "max_waiting": _max_waiting,
    "behind": _behind,
    "disabled": _disabled,
    "preset": _preset,
}
_TOP_VARIABLES = tuple(name for name in _TOP if name != "preset")
"""The preset is chosen by the name of the environment, SEMEL_ENV."""


def _policy_preset(value: object) -> dict[str, Any]:
    return _written(Policy.preset(_text(value)))


def _policy_value(name: str, value: object) -> object:
    if isinstance(value, str):
        if name in _MAY_BE_NONE and value.lower() == "none":
            value = None
        elif name in _DURATIONS:
            value = parse_duration(value)
    return getattr(Policy(**{name: value}), name)  # type: ignore[arg-type]  # Policy itself checks


def parse_duration(text: str) -> float:
    """Read `30`, `250ms`, `30s`, `10m`, `24h` or `7d` as seconds, if need be below 0."""
    parsed = _DURATION.fullmatch(text)
    if parsed is None:
        raise ConfigError("must be seconds or a text such as 250ms, 30s, 10m, 24h, 7d")
    number, unit = parsed.groups()
    return float(number) * _UNITS[unit or "s"]


_POLICY: dict[str, Check] = {name: partial(_policy_value, name) for name in POLICY_NAMES}
_POLICY["preset"] = _policy_preset


def _written(policy: Policy) -> dict[str, Any]:
    return {name: value for name, value in asdict(policy).items() if value is not UNSET}
