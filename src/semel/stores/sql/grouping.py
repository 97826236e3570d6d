"""Which operations of a transaction are carried out by one statement.

This module sorts. It touches no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from semel.core.records import Identity
from semel.stores.sql.jobs import Member
from semel.stores.sql.sqlite_statements import SIZES
from semel.stores.sql.verbs import Operation


def in_groups(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Put operations of one kind together; those on one record stay in their order."""
    kinds: dict[Callable[..., Any], list[Member]] = {}
    names: set[Identity] = set()
    for member in members:
        joint = member.operation.joint
        if joint is None or joint.identity in names:
            for group in kinds.values():
                yield from _cut(group)
            kinds, names = {}, set()
        if joint is None:
            yield [member]
        else:
            names.add(joint.identity)
            kinds.setdefault(joint.together, []).append(member)
    for group in kinds.values():
        yield from _cut(group)


def joined(group: Sequence[Member]) -> Operation[list[Any]]:
    """Make one operation of a group; `ALONE` stands for what it has no answer for."""
    joints = [joint for member in group if (joint := member.operation.joint) is not None]
    return Operation(partial(joints[0].together, [joint.ask for joint in joints]), peek=False)


def _cut(group: list[Member]) -> Iterator[list[Member]]:
    begin = 0
    for size in SIZES:
        while len(group) - begin >= size:
            yield group[begin : begin + size]
            begin += size
    if begin < len(group):
        yield group[begin:]
