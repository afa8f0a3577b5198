"""Shapes of values in a task file. They are composable, and can describe what they expect."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from holdfast.jobs.task.document import Value


@dataclass(frozen=True, slots=True)
class TaskProblem:
    """Problem in a task file."""

    line: int
    where: str  # path of keys, such as resources.accelerators
    what: str  # expected and found


class Shape(ABC):
    """Valid values in one place of a task file."""

    @abstractmethod
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        """Yield all problems of a value."""

    @abstractmethod
    def describe(self) -> str:
        """Return a description of what is expected, to follow the word "expected"."""

    def fits(self, value: Value) -> bool:
        """Return True if a value has no problems."""
        return next(self.problems(value, ""), None) is None

    def mismatch(self, value: Value, where: str) -> TaskProblem:
        """Return the problem of a value that has the wrong kind."""
        return TaskProblem(value.line, where, f"expected {self.describe()}, found {describe_value(value)}")


def describe_value(value: Value) -> str:
    """Return a value as text, shortened."""
    if value.kind != "scalar":
        return f"a {value.kind}"
    if value.plain is None:
        return "nothing"
    text = repr(value.plain)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Anything(Shape):
    """Any value, which is not checked."""

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        yield from ()

    @override
    def describe(self) -> str:
        return "anything"


@dataclass(frozen=True, slots=True)
class Scalar(Shape):
    """Scalar of some types."""

    types: tuple[type, ...]
    name: str
    allowed: Collection[str] = ()  # if given: only these, in upper or lower case
    least: float | None = None

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        if not self.is_of_type(value):
            yield self.mismatch(value, where)
        elif self.allowed and str(value.plain).lower() not in {one.lower() for one in self.allowed}:
            yield TaskProblem(value.line, where, self._not_allowed(str(value.plain)))
        elif self.least is not None and isinstance(value.plain, (int, float)) and value.plain < self.least:
            what = f"expected {self.describe()}, at least {self.least:g}, found {describe_value(value)}"
            yield TaskProblem(value.line, where, what)

    @override
    def describe(self) -> str:
        return f"one of {', '.join(self.allowed)}" if self.allowed else self.name

    def is_of_type(self, value: Value) -> bool:
        """Return True if the value has the right type."""
        if value.kind != "scalar" or (isinstance(value.plain, bool) and bool not in self.types):
            return False
        return isinstance(value.plain, self.types)

    def _not_allowed(self, found: str) -> str:
        return f"expected {self.describe()}, found {found!r}{nearest(found, self.allowed)}"


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

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        # Problems of the shape of the value's kind are more specific, if there is exactly one.
        if any(shape.fits(value) for shape in self.shapes):
            return
        near = [shape for shape in self.shapes if _is_near(shape, value)]
        if len(near) == 1:
            yield from near[0].problems(value, where)
        else:
            yield self.mismatch(value, where)

    @override
    def describe(self) -> str:
        names = [shape.describe() for shape in self.shapes if shape is not NOTHING]
        return " or ".join(dict.fromkeys(names))


def _is_near(shape: Shape, value: Value) -> bool:
    """Return True if a value has a shape's kind."""
    if isinstance(shape, Either):
        return any(_is_near(one, value) for one in shape.shapes)
    if isinstance(shape, Scalar):
        return shape.is_of_type(value)
    return value.kind == ("list" if isinstance(shape, ListOf) else "map")


def optional(shape: Shape) -> Shape:
    """Return a shape that also accepts an empty value."""
    return Either((shape, NOTHING))


@dataclass(frozen=True, slots=True)
class ListOf(Shape):
    """List of one shape."""

    item: Shape

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        if value.kind != "list":
            yield self.mismatch(value, where)
            return
        for number, item in enumerate(value.items):
            yield from self.item.problems(item, f"{where}[{number}]")

    @override
    def describe(self) -> str:
        return f"a list of {self.item.describe()}"


@dataclass(frozen=True, slots=True)
class MapOf(Shape):
    """Map with keys that users choose."""

    member: Shape

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        if value.kind != "map":
            yield self.mismatch(value, where)
            return
        for key, member in value.members.items():
            yield from self.member.problems(member, f"{where}.{key}")

    @override
    def describe(self) -> str:
        return f"a map to {self.member.describe()}"


@dataclass(frozen=True, slots=True)
class Keys(Shape):
    """Map with a fixed set of keys."""

    shapes: Mapping[str, Shape]
    name: str = "a map"

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        if value.kind != "map":
            yield self.mismatch(value, where)
            return
        for key, member in value.members.items():
            path = f"{where}.{key}" if where else key
            if key in self.shapes:
                yield from self.shapes[key].problems(member, path)
            else:
                yield TaskProblem(value.key_lines[key], path, self._unknown(key, where))

    @override
    def describe(self) -> str:
        return self.name

    def _unknown(self, key: str, where: str) -> str:
        place = f"in {where}" if where else "at the top of a task"
        hint = nearest(key, self.shapes) or f" Expected one of: {', '.join(self.shapes)}."
        return f"unknown key {key!r} {place}.{hint}"


def nearest(found: str, known: Collection[str]) -> str:
    """Return a question with the most similar valid word, or an empty string."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(found.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
