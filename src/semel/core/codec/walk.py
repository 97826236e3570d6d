"""Turns a value into a tree of plain data, and back.

A tree holds only what JSON and MessagePack tell apart by themselves. Everything else is tagged:
`{"$": tag, "v": ...}`. A dict of the user's that has a `$` key is tagged too, so that no value can
pass for a tag. How each type is tagged stands in `formats` and `kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from semel.core.codec.names import Names
from semel.core.refusal import Refused, check_text

Tree: TypeAlias = Any
"""None, bool, int, float, str, list or dict of trees (MessagePack: bytes too)."""

TAG: Final = "$"
VALUE: Final = "v"

MAX_DEPTH: Final = 100
"""Levels a value may have; what was written shallow in the stack must be readable deep in it."""


class Writer:
    """Makes the tree of one value."""

    __slots__ = ("_depth", "_formats", "_hint")

    def __init__(self, formats: Mapping[type, WriteTree], hint: object) -> None:
        self._hint = hint
        self._formats = formats
        self._depth = 0

    @property
    def names(self) -> Names:
        """What names its classes have."""
        return Names(self._hint)

    def tree(self, value: object) -> Tree:
        """Turn a value of any known type into its tree."""
        if self._depth == MAX_DEPTH:
            raise Refused(f"the value is nested deeper than {MAX_DEPTH} levels, or contains itself")
        self._depth += 1
        write = self._formats.get(type(value))
        tree = (self._formats[object] if write is None else write)(value, self)
        self._depth -= 1
        return tree

    def items(self, values: Iterable[object]) -> list[Tree]:
        """Turn each value into its tree."""
        trees: list[Tree] = []
        try:
            for value in values:
                trees.append(self.tree(value))  # noqa: PERF401 - its length is where it failed
        except Refused as refused:
            raise refused.inside(f"[{len(trees)}]") from None
        return trees

    def pairs(self, values: Mapping[Any, object]) -> list[Tree]:
        """Turn a mapping with any keys into a list of key and value, in order."""
        trees: list[Tree] = []
        for key, value in values.items():
            try:
                trees.append([self.tree(key), self.tree(value)])
            except Refused as refused:
                raise refused.inside(f"[{key!r}]") from None
        return trees

    def plain_dict(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Turn a mapping whose keys are all plain strings into a dict of trees."""
        trees: dict[str, Tree] = {}
        for key, value in values.items():
            try:
                check_text(key)
                trees[key] = self.tree(value)
            except Refused as refused:
                raise refused.inside(f"[{key!r}]") from None
        return trees

    def fields(self, values: Mapping[str, object]) -> dict[str, Tree]:
        """Turn the attributes of an object into a dict of trees."""
        trees: dict[str, Tree] = {}
        for name, value in values.items():
            try:
                trees[name] = self.tree(value)
            except Refused as refused:
                raise refused.inside(f".{name}") from None
        return trees


class Reader:
    """Makes the value of one tree."""

    __slots__ = ("_hint", "_tags")

    def __init__(self, tags: Mapping[str, ReadTree], hint: object) -> None:
        self._hint = hint
        self._tags = tags

    @property
    def names(self) -> Names:
        """What the names of classes in it mean."""
        return Names(self._hint)

    def value(self, tree: Tree) -> Any:
        """Turn a tree back into the value it was made from."""
        if type(tree) is list:
            return [self.value(item) for item in tree]
        if type(tree) is not dict:
            return tree
        if TAG not in tree:
            return {key: self.value(item) for key, item in tree.items()}
        read = self._tags.get(tree[TAG])
        if read is None:
            raise Refused(f"the tag {tree[TAG]!r} is not known to this version of semel")
        return read(tree, self)

    def items(self, trees: Tree) -> list[Any]:
        """Turn a list of trees into a list of values."""
        return [self.value(tree) for tree in _expect(list, trees)]

    def pairs(self, trees: Tree) -> list[tuple[Any, Any]]:
        """Turn what `Writer.pairs` made into keys and values."""
        return [(self.value(key), self.value(item)) for key, item in _expect(list, trees)]

    def fields(self, trees: Tree) -> dict[str, Any]:
        """Turn a dict of trees into a dict of values; no key in it is a tag."""
        return {name: self.value(tree) for name, tree in _expect(dict, trees).items()}


def _expect(cls: type, tree: Tree) -> Any:
    if type(tree) is not cls:
        raise Refused(f"found {type(tree).__name__} where {cls.__name__} should be")
    return tree


WriteTree: TypeAlias = Callable[[Any, Writer], Tree]
ReadTree: TypeAlias = Callable[[dict[str, Tree], Reader], Any]
