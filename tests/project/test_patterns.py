"""No regular expression of ours can be made slow: none has two ways to read the same characters.

A pattern is read as an automaton, one state for each set of characters in it. Matching takes more
than linear time if some text leads from a state back to it, from there to another state, and from
that one back to itself (Weber and Seidl, 1991): each copy of that text then doubles as a choice. A
search may also begin anywhere; it is quadratic if a loop can be entered anew at each beginning, and
may still fail.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = [file for file in sorted(SRC.rglob("*.py")) if "import re\n" in file.read_text()]
SEARCHING = {"search", "sub", "subn", "split", "findall", "finditer"}
MATCHING = {"compile", "match", "fullmatch"}

GIVEN = {
    "self.pattern = None if pattern is None else re.compile(pattern)",  # the application's; keys are short
    "re.search(words, text)",  # each of the words that _HOPELESS is made of
}
"""Patterns that are not constants, each with the reason why it is not checked."""

CATEGORIES = {
    kinds.CATEGORY_DIGIT: r"\d",
    kinds.CATEGORY_NOT_DIGIT: r"\D",
    kinds.CATEGORY_SPACE: r"\s",
    kinds.CATEGORY_NOT_SPACE: r"\S",
    kinds.CATEGORY_WORD: r"\w",
    kinds.CATEGORY_NOT_WORD: r"\W",
}
ALL = frozenset(range(256))


class Automaton:
    """The states of a pattern (Glushkov's): what each takes, and which may follow it."""

    def __init__(self, pattern: str | bytes, flags: int = 0, *, searched: bool = False) -> None:
        self.takes: list[frozenset[int]] = []
        self.follows: dict[int, set[int]] = {}
        self.doubled = False
        """One state follows another in two ways, as in `(a+)+`."""
        self._any_case = bool(flags & re.IGNORECASE)
        parsed = parser.parse(pattern, flags & ~re.DEBUG)
        first, self.last, _ = self._sequence(parsed)
        if searched:
            beginning = self._state(ALL)
            self.follows[beginning] |= {beginning, *first}

    def _state(self, taken: Iterable[int]) -> int:
        self.takes.append(frozenset(taken))
        self.follows[len(self.takes) - 1] = set()
        return len(self.takes) - 1

    def _connect(self, ends: set[int], begins: set[int]) -> None:
        for end in ends:
            self.doubled = self.doubled or bool(self.follows[end] & begins)
            self.follows[end] |= begins

    def _sequence(self, parts: Iterable[tuple[object, object]]) -> tuple[set[int], set[int], bool]:
        """Return the first and the last states of some parts, and whether all may be left out."""
        first: set[int] = set()
        last: set[int] = set()
        empty = True
        for part in parts:
            begins, ends, skipped = self._part(*part)
            self._connect(last, begins)
            first |= begins if empty else set()
            last = ends | (last if skipped else set())
            empty = empty and skipped
        return first, last, empty

    def _part(self, kind: object, value) -> tuple[set[int], set[int], bool]:
        if kind in {kinds.MAX_REPEAT, kinds.MIN_REPEAT}:
            least, most, inner = value
            first, last, empty = self._sequence(inner)
            if most > 1:
                self._connect(last, first)
            return first, last, empty or least == 0
        if kind is kinds.SUBPATTERN:
            return self._sequence(value[3])
        if kind is kinds.BRANCH:
            branches = [self._sequence(branch) for branch in value[1]]
            first = set().union(*(branch[0] for branch in branches))
            last = set().union(*(branch[1] for branch in branches))
            return first, last, any(branch[2] for branch in branches)
        if kind is kinds.AT or kind is kinds.ASSERT_NOT:
            return set(), set(), True
        if kind is kinds.ASSERT:  # as if it took what it looks at: a match may fail there
            return self._sequence(value[1])
        state = {self._state(self._taken(kind, value))}
        return state, state, False

    def _taken(self, kind: object, value) -> frozenset[int]:
        if kind is kinds.LITERAL:
            return frozenset({value, ord(chr(value).swapcase())} if self._any_case else {value})
        if kind is kinds.NOT_LITERAL:
            return ALL - {value}
        if kind is kinds.ANY:
            return ALL
        if kind is kinds.RANGE:
            return frozenset(
                code
                for each in range(value[0], value[1] + 1)
                for code in self._taken(kinds.LITERAL, each)
            )
        if kind is kinds.CATEGORY:
            return frozenset(code for code in ALL if re.match(CATEGORIES[value], chr(code)))
        assert kind is kinds.IN, f"{kind} is not known here"
        negated = value[0][0] is kinds.NEGATE
        taken = frozenset().union(*(self._taken(*each) for each in value[negated:]))
        return ALL - taken if negated else taken

    def loops(self) -> set[int]:
        return {state for state in self.follows if state in self._reached(state)}

    def _reached(self, state: int) -> set[int]:
        found, new = set(), {state}
        while new:
            new = set().union(*(self.follows[each] for each in new)) - found
            found |= new
        return found

    def ambiguity(self) -> tuple[int, int] | None:
        """Two states that the same text leads around in, and from the first to the second."""
        loops = self.loops()
        for one, other in product(sorted(loops), repeat=2):
            if one != other and other in self._reached(one) and self._meet(one, other):
                return one, other
        return None

    def _meet(self, one: int, other: int) -> bool:
        goal, found, new = (one, other, other), set(), [(one, one, other)]
        while new:
            for following in product(*(self.follows[state] for state in new.pop())):
                if following not in found and frozenset.intersection(
                    *(self.takes[state] for state in following)
                ):
                    if following == goal:
                        return True
                    found.add(following)
                    new.append(following)
        return False


def is_slow(pattern: str | bytes, flags: int = 0, *, searched: bool = False) -> bool:
    automaton = Automaton(pattern, flags)
    if automaton.doubled or automaton.ambiguity() is not None:
        return True
    if not searched:
        return False
    automaton = Automaton(pattern, flags, searched=True)
    beginning = len(automaton.takes) - 1
    # Where a match may end, the search has ended: nothing is tried again.
    return any(
        state != beginning and state not in automaton.last and automaton._meet(beginning, state)
        for state in automaton.loops()
    )


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        ("(a+)+b", False),
        ("(?:ab|a|b)*c", False),
        (r"\s*\s*x", False),
        (r"(?:;\w+=x)*;boundary=x(?:;\w+=x)*", False),
        ("/.*/a.*/b", False),
        ("SEMEL<(.*?)>", True),
        (r"\s*[a-z]+(?=\s)", True),
        (r"x+\s*\d", True),
    ],
)
def test_a_slow_pattern_is_known(pattern, searched):
    assert is_slow(pattern, searched=searched)


@pytest.mark.parametrize(
    ("pattern", "searched"),
    [
        ("[^;]*;a*", False),
        ("(?:;a)*", False),
        ("--[^\n]*", True),
        ("'[^']*' command|x", True),
        (r"\s*[a-z]+", False),
    ],
)
def test_a_pattern_that_reads_its_text_in_one_way_is_fast(pattern, searched):
    assert not is_slow(pattern, searched=searched)


def module_of(file: Path):
    name = ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    with pytest.MonkeyPatch.context() as patched:  # no worker that a later test starts inherits it
        patched.setenv("DJANGO_SETTINGS_MODULE", "adapters.django_project")
        return importlib.import_module(name)


def calls(source: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node


def patterns_of(file: Path) -> Iterator[tuple[str | bytes, int, bool]]:
    """Every pattern of a module, and whether it is searched for."""
    source, module = file.read_text(), module_of(file)
    named = {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
    searched = {
        call.func.value.id
        for call in calls(source)
        if call.func.attr in SEARCHING and isinstance(call.func.value, ast.Name)
    }
    for name, pattern in named.items():
        yield pattern.pattern, pattern.flags & ~re.UNICODE, name in searched
    for call in calls(source):
        if ast.unparse(call.func.value) != "re" or call.func.attr not in SEARCHING | MATCHING:
            continue
        if isinstance(call.args[0], ast.Constant):
            yield call.args[0].value, 0, call.func.attr in SEARCHING
        else:
            line = source.splitlines()[call.lineno - 1]
            made = any(name in line for name in named) or any(each in line for each in GIVEN)
            assert made, f"{file}:{call.lineno} makes a pattern that no test sees"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_no_pattern_of_ours_takes_more_than_linear_time(file):
    for pattern, flags, searched in patterns_of(file):
        assert not is_slow(pattern, flags, searched=searched), pattern
