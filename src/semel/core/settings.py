"""Settings: where records are kept and which policy applies, from files, environment and code.

Later wins, field by field:

    preset < semel.toml < semel.{environment}.toml < SEMEL_* variables < code

Every source is read before anything is said, so that one `ConfigError` names all that is wrong. A
URL is never shown: it may hold a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from semel.core.fingerprint import check_secrets
from semel.core.keys import KeyRules
from semel.core.policy import (
    DAY,
    HOUR,
    MINUTE,
    POLICY_FIELDS,
    POSITIVE,
    Policy,
    seconds,
    written,
)
from semel.core.run_info import NAME_VARIABLE
from semel.errors import ConfigError, IdempotencyError

FILE_NAME = "semel.toml"


DEFAULT_ENVIRONMENT = "default"


TOKEN_VARIABLE = "SEMEL_TOKEN"  # noqa: S105 - the name of one
"""The secret that a remote store sends to its service: `semel.stores.remote.addresses` reads it."""


_OF_THE_PROCESS = (NAME_VARIABLE, TOKEN_VARIABLE)
"""Variables that are no settings."""


CODE = "code"
"""The source of what the program itself says."""


VARIABLE_PREFIX = "SEMEL_"


PRESETS: dict[str, dict[str, Any]] = {
    "default": {"url": "sqlite:///semel.db"},
    "development": {"url": "sqlite:///semel-dev.db", "policy": {"ttl": HOUR}},
    "test": {"url": "memory://", "policy": {"ttl": 5 * MINUTE}},
    "production": {},  # a URL must be given: production never guesses where records are kept
}
"""The settings presets; each is the lowest layer, written like a file."""


_ENVIRONMENT_NAME = re.compile(r"[\w-]+")
"""It becomes part of a file's name, so it must not lead out of the folder."""


BYPASSED: ContextVar[bool] = ContextVar("semel_bypassed", default=False)
"""Whether the running thread or task calls functions straight (`semel.testing.bypass`). Every call
asks the variable itself, because a function around it would be half the cost."""


Bounds: TypeAlias = Mapping[str, tuple[float, float]]
"""The least and the most seconds that a client of the service may ask for: `lease` has bounds."""

BOUNDED = ("lease",)
"""What a client of the service may ask for."""

WILDCARD = "*"


def names_for(scope: str, names: Collection[str]) -> tuple[str, ...]:
    """Return which of these names and patterns speak of a scope, the closest first.

    The name of the scope itself comes first, then the longest pattern.

    >>> names_for("orders.pay", ["*", "orders.pay", "orders.*", "bills.*"])
    ('orders.pay', 'orders.*', '*')
    """
    patterns = [
        name
        for name in names
        if name != scope and name.endswith(WILDCARD) and scope.startswith(name[:-1])
    ]
    own = (scope,) if scope in names else ()
    return (*own, *sorted(patterns, key=len, reverse=True))


class Settings(Struct, frozen=True, kw_only=True):
    """Everything that can be configured outside the code."""

    url: str | None
    """Where records are kept; None when the code brings a store of its own."""
    behind: str | None = None
    """The store that decides, when the one at `url` is Redis and only stands in front."""
    prefix: str = "idem:"
    key_pattern: str | None = None
    max_waiting: int | UnsetType | None = UNSET
    """How many calls of an engine may wait at a time; None = no bound, UNSET = the default."""
    fingerprint_secret: tuple[bytes, ...] = ()
    """The secrets that fingerprints are made with: the first one writes, all are compared."""
    policy: Policy = Policy()
    scopes: dict[str, Policy] = {}
    """By scope, or by a pattern: the beginning of scopes, and a `*` at the end."""
    bounds: dict[str, Bounds] = {}
    """What clients of the service may ask for, by scope or pattern."""
    environment: str = DEFAULT_ENVIRONMENT
    preset: str = "default"
    disabled: bool = False
    """True: calls run unprotected; for tests."""
    sources: dict[str, str] = {}
    """Where `url` and the others are said, for errors: `SEMEL_URL`, `semel.toml: url`."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return [(name, _HIDDEN if name in _SECRET and value else value) for name, value in shown]

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


_SECRET = frozenset({"url", "behind", "fingerprint_secret"})
"""What a representation hides: a URL may hold a password."""


_HIDDEN = "..."


def load_settings(
    environ: Mapping[str, str] | None = None, directory: Path | None = None, **overrides: Any
) -> Settings:
    """Read the settings; `overrides` are fields of `Settings` given by the code.

    `url=None` among them says that the code brings its own store, so that none is looked for.
    """
    reader = LayerReader()
    variables = own_variables(os.environ if environ is None else environ)
    named = overrides.pop("environment", variables.pop("SEMEL_ENV", None))
    config = variables.pop("SEMEL_CONFIG", None)
    for name in _OF_THE_PROCESS:
        variables.pop(name, None)
    environment = DEFAULT_ENVIRONMENT if named is None else named
    if not isinstance(environment, str) or not _ENVIRONMENT_NAME.fullmatch(environment):
        reader.problems.append("SEMEL_ENV: a name is made of letters, digits, _ and -")
        environment = DEFAULT_ENVIRONMENT
    folder = Path() if directory is None else directory
    base = folder / (FILE_NAME if config is None else config)
    no_base = None if config is None else f"SEMEL_CONFIG: there is no file {base}"
    own = base.parent / f"{base.stem}.{environment}.toml"

    layers = [
        reader.file(base, if_missing=no_base),
        reader.file(own, if_missing=_unknown_environment(environment, own)),
        reader.variables(variables),
        reader.table(CODE, overrides),
    ]
    preset = _choose_preset(named, layers)
    settings = _merge([reader.table("preset", PRESETS[preset]), *layers])
    problems = [*reader.problems, *_unfit_for_production(preset, settings, said=layers[2:])]
    if problems:
        raise ConfigError("\n  - ".join(["these settings are wrong:", *problems]))
    return Settings(
        **{**settings.top, "preset": preset},
        environment=environment,
        policy=Policy(**settings.policy),
        scopes={scope: Policy(**fields) for scope, fields in settings.scopes.items()},
        bounds=settings.bounds,
        sources=settings.sources,
    )


def _unknown_environment(name: str, file: Path) -> str | None:
    """Say what is wrong with a name that changes nothing: it may be a typo."""
    if name in PRESETS:
        return None
    known = ", ".join(PRESETS)
    return (
        f"SEMEL_ENV: {name!r} is not known: there is no file {file.name}, and presets are {known}"
    )


def _choose_preset(environment: str | None, layers: list[Layer]) -> str:
    """Take the code's word, else the environment's name if it is one, else what a file says."""
    *files_and_variables, code = (layer.top.get("preset") for layer in layers)
    by_name = environment if environment in PRESETS else None
    chosen = [name for name in (*files_and_variables, by_name, code) if name is not None]
    return chosen[-1] if chosen else "default"


def _merge(layers: Iterable[Layer]) -> Layer:
    merged = Layer.empty()
    for layer in layers:
        merged.top.update(layer.top)
        merged.policy.update(layer.policy)
        merged.sources.update(layer.sources)
        for scope, fields in layer.scopes.items():
            merged.scopes.setdefault(scope, {}).update(fields)
        for scope, bounds in layer.bounds.items():
            merged.bounds[scope] = {**merged.bounds.get(scope, {}), **bounds}
    return merged


def _unfit_for_production(preset: str, settings: Layer, said: Iterable[Layer]) -> Iterable[str]:
    """Say what production does not take; `said` are the layers that are no files."""
    top = settings.top
    if preset != "production":
        return
    if "url" not in top:
        yield "production needs a store: set SEMEL_URL, or url in semel.toml"
    elif any((top.get(name) or "").startswith("memory:") for name in ("url", "behind")):
        yield "production must not keep its records in memory: they end with the process"
    if top.get("disabled") and not any("disabled" in layer.top for layer in said):
        yield (
            f"{settings.sources['disabled']}: production does not run unprotected because of a "
            "file: remove disabled, or set SEMEL_DISABLED=true if that is what you want"
        )


# --- layers: what one source says ---------------------------------------------------------


class Layer(NamedTuple):
    """What one source says, checked; names that it leaves out are not in it."""

    top: dict[str, Any]
    policy: dict[str, Any]
    scopes: dict[str, dict[str, Any]]
    sources: dict[str, str]
    """Where each of `top` is said, for errors."""
    bounds: dict[str, Bounds]

    @classmethod
    def empty(cls) -> Layer:
        """Begin a layer that says nothing yet."""
        return cls({}, {}, {}, {}, {})


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
        except (ValueError, RecursionError) as error:  # the error names the line; or not UTF-8
            self.problems.append(f"{path.name}: is not valid TOML: {error}")
        return self.table(path.name, table)

    def variables(self, environ: Mapping[str, str]) -> Layer:
        """Read variables as `own_variables` returns them."""
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
                self._unknown(
                    variable, variable, [*known, "SEMEL_ENV", "SEMEL_CONFIG", *_OF_THE_PROCESS]
                )
        return layer

    def table(self, source: str, table: Mapping[str, Any]) -> Layer:
        """Read the settings of a file, of a preset, or of the code."""
        layer = Layer.empty()
        for name, value in table.items():
            where = f"{source}: {name}"
            if name == "policy":
                layer.policy.update(self._policy(where, value))
            elif name == "scopes":
                self._scopes(where, value, layer)
            elif name in _TOP:
                self._keep(layer.top, _TOP, name, value, where)
                layer.sources[name] = where
            else:
                self._unknown(where, name, [*_TOP, "policy", "scopes"])
        return layer

    def _scopes(self, where: str, table: object, layer: Layer) -> None:
        for scope, fields in self._entries(where, table):
            try:
                KeyRules().check_scope(scope)
            except IdempotencyError as error:
                self.problems.append(f"{where}: {error}")
                continue
            place, rest = f'{where}."{scope}"', fields
            if isinstance(fields, Mapping) and "bounds" in fields:
                rest = {name: value for name, value in fields.items() if name != "bounds"}
                layer.bounds[scope] = self._bounds(f"{place}.bounds", fields["bounds"])
            layer.scopes[scope] = self._policy(place, rest)

    def _bounds(self, where: str, table: object) -> Bounds:
        bounds: dict[str, tuple[float, float]] = {}
        for name, value in self._entries(where, table):
            if name in BOUNDED:
                self._keep(bounds, {name: _pair}, name, value, f"{where}.{name}")
            else:
                self._unknown(f"{where}.{name}", name, BOUNDED)
        return bounds

    def _policy(self, where: str, table: object) -> dict[str, Any]:
        if isinstance(table, Policy):
            return written(table)
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
        if name.startswith(VARIABLE_PREFIX) and text != "" and not _is_of_kubernetes(name)
    }


def _is_of_kubernetes(name: str) -> bool:
    """Whether Kubernetes sets it in every pod, about a service called semel or semel-something."""
    words = name.removeprefix(VARIABLE_PREFIX).split("_")
    return any(
        (word == "SERVICE" and after in {"HOST", "PORT"})
        or (word == "PORT" and (after == "" or after.isdigit()))
        for word, after in pairwise([*words, ""])
    )


def _from_text(name: str, text: str) -> object:
    """Turn a variable's text into what a file would hold; the check rejects what stays text."""
    if name in _SWITCHES:
        word = text.lower()
        return word in _YES if word in (*_YES, *_NO) else text
    if name == "fingerprint_secret":
        return text.split()  # several for a rotation
    if name in _WHOLE_NUMBERS and re.fullmatch("[0-9]{1,18}", text):
        return int(text)
    return text


# --- checks of single values --------------------------------------------------------------


Check: TypeAlias = Callable[[object], object]
"""Returns a value in its stored form, or raises ConfigError."""


POLICY_NAMES = tuple(name for name in POLICY_FIELDS if name != "not_done")
"""The policy fields that can be written as text; `not_done` holds classes."""


_DURATIONS = (*POSITIVE, "wait_timeout")


_WHOLE_NUMBERS = ("max_attempts", "max_result_bytes", "max_waiting")


_SWITCHES = ("disabled", "payload_required")


_MAY_BE_NONE = ("wait_timeout", "max_attempts")


_UNITS = {"ms": 0.001, "s": 1.0, "m": MINUTE, "h": HOUR, "d": DAY}


_DURATION = re.compile(rf"(-?\d+(?:\.\d+)?)({'|'.join(_UNITS)})?", re.ASCII)


_YES = ("1", "true", "yes", "on")


_NO = ("0", "false", "no", "off")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"must be a string, not {type(value).__name__}")
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
    "fingerprint_secret": check_secrets,
    "behind": _behind,
    "disabled": _disabled,
    "preset": _preset,
}


_TOP_VARIABLES = tuple(name for name in _TOP if name != "preset")
"""The preset is chosen by the name of the environment, SEMEL_ENV."""


def _pair(value: object) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:  # noqa: PLR2004 - a pair
        raise ConfigError("must be the least and the most, such as [5, 600]")
    least, most = (
        seconds("a bound", parse_duration(each) if isinstance(each, str) else each)
        for each in value
    )
    if least > most:
        raise ConfigError(f"must be the least and the most; {least:g} is more than {most:g}")
    return least, most


def _policy_preset(value: object) -> dict[str, Any]:
    return written(Policy.preset(_text(value)))


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
        raise ConfigError("must be seconds or a string such as 250ms, 30s, 10m, 24h, 7d")
    number, unit = parsed.groups()
    return float(number) * _UNITS[unit or "s"]


_POLICY: dict[str, Check] = {
    **{name: partial(_policy_value, name) for name in POLICY_NAMES},
    "preset": _policy_preset,
}
