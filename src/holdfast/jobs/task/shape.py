"""What a value of a task file may be: small shapes that compose, and tell in words what they expect."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from holdfast.jobs.task.document import Value


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the file that is not as it must be."""

    line: int
    where: str  # path of keys, as resources.accelerators
    what: str  # expected and found


class Shape(ABC):
    """What may stand in one place."""

    @abstractmethod
    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        """All that is wrong with a value."""

    @abstractmethod
    def say(self) -> str:
        """What is expected, in words, after "expected"."""

    def fits(self, value: Value) -> bool:
        """True if nothing is wrong with it."""
        return next(self.problems(value, ""), None) is None

    def refuse(self, value: Value, where: str) -> Problem:
        """The problem of a value that is not of this kind at all."""
        return Problem(value.line, where, f"expected {self.say()}, found {say_value(value)}")


def say_value(value: Value) -> str:
    """A value in words, cut short."""
    if value.kind != "scalar":
        return f"a {value.kind}"
    if value.plain is None:
        return "nothing"
    text = repr(value.plain)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Anything(Shape):
    """Not looked into."""

    @override
    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        yield from ()

    @override
    def say(self) -> str:
        return "anything"


@dataclass(frozen=True, slots=True)
class Scalar(Shape):
    """A scalar of some types."""

    types: tuple[type, ...]
    name: str
    allowed: Collection[str] = ()  # if given: these, in any case of letters
    least: float | None = None

    @override
    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        if not self.is_of_type(value):
            yield self.refuse(value, where)
        elif self.allowed and str(value.plain).lower() not in {one.lower() for one in self.allowed}:
            yield Problem(value.line, where, self._not_allowed(str(value.plain)))
        elif self.least is not None and isinstance(value.plain, (int, float)) and value.plain < self.least:
            what = f"expected {self.say()}, at least {self.least:g}, found {say_value(value)}"
            yield Problem(value.line, where, what)

    @override
    def say(self) -> str:
        return f"one of {', '.join(self.allowed)}" if self.allowed else self.name

    def is_of_type(self, value: Value) -> bool:
        """True if only what it says can be wrong."""
        if value.kind != "scalar" or (isinstance(value.plain, bool) and bool not in self.types):
            return False
        return isinstance(value.plain, self.types)

    def _not_allowed(self, found: str) -> str:
        return f"expected {self.say()}, found {found!r}{nearest(found, self.allowed)}"


NOTHING = Scalar((type(None),), "nothing")
TEXT = Scalar((str,), "text")
FLAG = Scalar((bool,), "true or false")
WHOLE = Scalar((int,), "a whole number")
COUNT = Scalar((int,), "a whole number", least=1)
NUMBER = Scalar((int, float), "a number")


@dataclass(frozen=True, slots=True)
class Either(Shape):
    """One of several shapes."""

    shapes: tuple[Shape, ...]

    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        """See Shape.problems: of the shape of the value's kind, if that can be told, since it says more."""
        if any(shape.fits(value) for shape in self.shapes):
            return
        near = [shape for shape in self.shapes if _is_near(shape, value)]
        if len(near) == 1:
            yield from near[0].problems(value, where)
        else:
            yield self.refuse(value, where)

    @override
    def say(self) -> str:
        said = [shape.say() for shape in self.shapes if shape is not NOTHING]
        return " or ".join(dict.fromkeys(said))


def _is_near(shape: Shape, value: Value) -> bool:
    """True if a value is of a shape's kind, so that the shape can tell better what is wrong with it."""
    if isinstance(shape, Either):
        return any(_is_near(one, value) for one in shape.shapes)
    if isinstance(shape, Scalar):
        return shape.is_of_type(value)
    return value.kind == ("list" if isinstance(shape, ListOf) else "map")


def or_nothing(shape: Shape) -> Shape:
    """A shape whose place may also be left empty."""
    return Either((shape, NOTHING))


@dataclass(frozen=True, slots=True)
class ListOf(Shape):
    """A list of one shape."""

    item: Shape

    @override
    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        if value.kind != "list":
            yield self.refuse(value, where)
            return
        for number, item in enumerate(value.items):
            yield from self.item.problems(item, f"{where}[{number}]")

    @override
    def say(self) -> str:
        return f"a list of {self.item.say()}"


@dataclass(frozen=True, slots=True)
class MapOf(Shape):
    """A map with keys that users choose."""

    member: Shape

    @override
    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        if value.kind != "map":
            yield self.refuse(value, where)
            return
        for key, member in value.members.items():
            yield from self.member.problems(member, f"{where}.{key}")

    @override
    def say(self) -> str:
        return f"a map to {self.member.say()}"


@dataclass(frozen=True, slots=True)
class Keys(Shape):
    """A map with a fixed set of keys."""

    shapes: Mapping[str, Shape]
    name: str = "a map"

    @override
    def problems(self, value: Value, where: str) -> Iterator[Problem]:
        if value.kind != "map":
            yield self.refuse(value, where)
            return
        for key, member in value.members.items():
            path = f"{where}.{key}" if where else key
            if key in self.shapes:
                yield from self.shapes[key].problems(member, path)
            else:
                yield Problem(value.key_lines[key], path, self._unknown(key, where))

    @override
    def say(self) -> str:
        return self.name

    def _unknown(self, key: str, where: str) -> str:
        place = f"in {where}" if where else "at the top of a task"
        hint = nearest(key, self.shapes) or f" Expected one of: {', '.join(self.shapes)}."
        return f"there is no key {key!r} {place}.{hint}"


def nearest(found: str, known: Collection[str]) -> str:
    """A question that names the nearest known word; empty if none is near."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(found.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
