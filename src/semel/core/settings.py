"""Settings: where records are kept and which policy applies, from files, environment and code.

This module decides on precedence. Later wins, field by field:

    preset < semel.toml < semel.{environment}.toml < SEMEL_* variables < code

Every source is read before anything is said, so that one `ConfigError` names all that is wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from semel.core.layers import PRESETS, Layer, LayerReader, own_variables
from semel.core.policy import Policy
from semel.errors import ConfigError

FILE_NAME = "semel.toml"
DEFAULT_ENVIRONMENT = "default"
CODE = "code"
"""The source of what the program itself says."""

_ENVIRONMENT_NAME = re.compile(r"[\w-]+")
"""It becomes part of a file's name, so it must not lead out of the folder."""


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
    policy: Policy = Policy()
    scopes: dict[str, Policy] = {}
    environment: str = DEFAULT_ENVIRONMENT
    preset: str = "default"
    disabled: bool = False
    """True: calls run unprotected; for tests."""
    sources: dict[str, str] = {}
    """Where `url` and the others are said, for errors: `SEMEL_URL`, `semel.toml: url`."""


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
    problems = [*reader.problems, *_unfit_for_production(preset, settings.top)]
    if problems:
        raise ConfigError("\n  - ".join(["these settings are wrong:", *problems]))
    return Settings(
        **{**settings.top, "preset": preset},
        environment=environment,
        policy=Policy(**settings.policy),
        scopes={scope: Policy(**fields) for scope, fields in settings.scopes.items()},
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
    return merged


def _unfit_for_production(preset: str, top: Mapping[str, Any]) -> Iterable[str]:
    if preset != "production":
        return
    if "url" not in top:
        yield "production needs a store: set SEMEL_URL, or url in semel.toml"
    elif any((top.get(name) or "").startswith("memory:") for name in ("url", "behind")):
        yield "production must not keep its records in memory: they end with the process"
