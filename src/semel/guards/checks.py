"""Refuses wrong arguments by their names, before a database sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from semel.errors import ConfigError


def whole_number(name: str, value: object) -> int:
    """Give a whole number; True is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {_shown(value)}")
    return value


def mapping(name: str, value: object) -> dict[str, object]:
    """Give a mapping from column to value."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping from column to value, not {_shown(value)}")
    return dict(value)


def state(name: str, value: object) -> str:
    """Give the name of a state."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} must be the name of a state, not {_shown(value)}")
    return value


def transitions(value: object, states: object) -> dict[str, tuple[str, ...]]:
    """Give the states that lead to each target; all must be among `states`, if those are given."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            "transitions must be a mapping from each target to the states that lead to it, "
            + (f"not {_shown(value)}" if not isinstance(value, Mapping) else "and not be empty")
        )
    checked = {state("target", target): _sources(target, given) for target, given in value.items()}
    if states is not None:
        known = _states("states", states)
        named = {each for target, sources in checked.items() for each in (target, *sources)}
        unknown = sorted(named - set(known))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not among the states {', '.join(sorted(known))}")
    return checked


def _sources(target: str, given: object) -> tuple[str, ...]:
    sources = _states(f"source of {target!r}", given)
    if not sources or target in sources:
        raise ConfigError(f"name the states that lead to {target!r}, without itself")
    return sources


def _states(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (state(name, given),)
    if not isinstance(given, Collection):
        raise ConfigError(f"{name} must be a state or several, not {_shown(given)}")
    return tuple(state(name, each) for each in given)


def _shown(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float) else type(value).__name__
