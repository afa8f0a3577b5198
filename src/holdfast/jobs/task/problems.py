"""Problems of a task: all keys and the shapes of their values are checked before any is reported."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec import Struct

from holdfast.jobs.task import document
from holdfast.jobs.task.document import TaskDocument
from holdfast.jobs.task.model import is_multiple, memory_mib, parse_accelerators, parse_cpus, path_in_workdir

MAX_PRIORITY = 1000  # and the least one without its sign. Source: skypilot, sky/skylet/constants.py
_MAX_LISTED = 10


class TaskProblem(Struct, frozen=True):
    """Problem in a task file."""

    line: int
    where: str  # path of keys, such as resources.accelerators
    what: str  # expected and found


class Shape(Struct, frozen=True, kw_only=True):
    """Valid values in one place of a task file; by default, all values."""

    kind: str = "any"  # or scalar, list, map
    name: str = "anything"  # description of the valid values, to follow the word "expected"
    types: tuple[type, ...] = ()  # of a scalar
    allowed: Collection[str] = ()  # if given: only these, in upper or lower case
    least: float | None = None
    inner: Shape | None = None  # of each item of a list, or each value of a map with keys that users choose
    shapes: Mapping[str, Shape] = {}  # of a map with a fixed set of keys, by key
    either: tuple[Shape, ...] = ()  # shapes of which a value must have one

    def is_near(self, value: Any) -> bool:
        """Return True if a value has the right kind or type."""
        if self.either:
            return any(shape.is_near(value) for shape in self.either)
        kind = _kind(value)
        if self.kind != "scalar" or kind != "scalar":
            return self.kind in ("any", kind)
        is_other_flag = isinstance(value, bool) and bool not in self.types
        return isinstance(value, self.types) and not is_other_flag

    def fits(self, value: Any) -> bool:
        """Return True if a value has no problems."""
        return next(self.problems(value, "", TaskDocument(value)), None) is None

    def problems(self, value: Any, where: str, task: TaskDocument) -> Iterator[TaskProblem]:
        """Yield all problems of a value at a path of a task."""
        near = [shape for shape in self.either if shape.is_near(value)]
        if any(shape.fits(value) for shape in near):
            return
        line = task.value_lines.get(where, 0)
        if len(near) == 1:  # more specific
            yield from near[0].problems(value, where, task)
        elif self.either or not self.is_near(value):
            yield TaskProblem(line, where, f"expected {self.name}, found {_shown(value)}")
        elif self.allowed and str(value).lower() not in {word.lower() for word in self.allowed}:
            what = f"expected {self.name}, found {str(value)!r}{nearest(str(value), self.allowed)}"
            yield TaskProblem(line, where, what)
        elif self.least is not None and value < self.least:
            what = f"expected {self.name}, at least {self.least:g}, found {_shown(value)}"
            yield TaskProblem(line, where, what)
        elif self.kind == "list" and self.inner:
            for number, item in enumerate(value):
                yield from self.inner.problems(item, f"{where}[{number}]", task)
        elif self.kind == "map":
            for key, member in value.items():
                yield from self._member_problems(str(key), member, where, task)

    def _member_problems(
        self, key: str, member: Any, where: str, task: TaskDocument
    ) -> Iterator[TaskProblem]:
        path = f"{where}.{key}" if where else key
        if shape := self.shapes.get(key, self.inner):
            yield from shape.problems(member, path, task)
            return
        place = f"in {where}" if where else "at the top of a task"
        hint = nearest(key, self.shapes) or f" Expected one of: {', '.join(self.shapes)}."
        # A key in which a variable was filled in has the line of the map around it.
        line = task.key_lines.get(path) or task.value_lines.get(where, 0)
        yield TaskProblem(line, path, f"unknown key {key!r} {place}.{hint}")


def _kind(value: Any) -> str:
    """Return the kind of a plain value: scalar, list or map."""
    return "map" if isinstance(value, dict) else "list" if isinstance(value, list) else "scalar"


def _shown(value: Any) -> str:
    if _kind(value) != "scalar":
        return f"a {_kind(value)}"
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


NOTHING = Shape(kind="scalar", name="nothing", types=(type(None),))
_NAMED = {
    "anything": Shape(),
    "nothing": NOTHING,
    "text": Shape(kind="scalar", name="text", types=(str,)),
    "flag": Shape(kind="scalar", name="true or false", types=(bool,)),
    "whole": Shape(kind="scalar", name="a whole number", types=(int,)),
    "natural": Shape(kind="scalar", name="a whole number", types=(int,), least=0),
    "count": Shape(kind="scalar", name="a whole number", types=(int,), least=1),
    "number": Shape(kind="scalar", name="a number", types=(int, float)),
}


def _read_shape(found: Any) -> Shape:
    """Return a shape of `shapes.yaml`."""
    if isinstance(found, str):
        return _NAMED[found]
    if isinstance(found, list):
        shapes = tuple(map(_read_shape, found))
        names = dict.fromkeys(shape.name for shape in shapes if shape is not NOTHING)
        return Shape(name=" or ".join(names), either=shapes)
    if words := found.get("words"):
        return Shape(kind="scalar", name=f"one of {', '.join(words)}", types=(str,), allowed=words)
    for kind, name in (("list", "a list of"), ("map", "a map to")):
        if kind in found:
            inner = _read_shape(found[kind])
            return Shape(kind=kind, name=f"{name} {inner.name}", inner=inner)
    shapes = {key: _read_shape(shape) for key, shape in found["keys"].items()}
    return Shape(kind="map", name=found.get("name", "a map"), shapes=shapes)


def nearest(found: str, known: Collection[str]) -> str:
    """Return a question with the most similar valid word, or an empty string."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(found.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


TASK = _read_shape(document.read_table("task/shapes.yaml")["task"])
RESOURCES = TASK.shapes["resources"].either[0].shapes  # by key
ACCELERATORS = RESOURCES["accelerators"]  # in any form


def find_problems(
    task: TaskDocument, envs: Mapping[str, str], secrets: Mapping[str, str]
) -> Iterator[TaskProblem]:
    """Yield the problems of a task whose aliases are replaced; the command line may add variables."""
    root, key_lines = task.plain, task.key_lines
    if not isinstance(root, dict):
        yield from TASK.problems(root, "", task)
        return
    filled = dict(root)
    if isinstance(mounts := root.get("file_mounts"), dict):
        # SkyPilot too replaces variables first. Values of secrets stay out of messages.
        variables = document.parse_variables(root.get("envs"), envs)
        filled["file_mounts"] = {target: document.fill_in(spec, variables) for target, spec in mounts.items()}
    yield from TASK.problems(filled, "", task)
    if not (root.keys() & {"pool", "service"} or root.get("run")):
        what = "expected the commands of the job, found nothing"
        yield TaskProblem(task.value_lines.get("", 0), "run", what)
    yield from _variable_problems(task, "envs", "--env", envs)
    yield from _variable_problems(task, "secrets", "--secret", secrets)
    for key, use in (("service", "sky serve up"), ("pool", "sky jobs pool apply")):
        if key in root:
            what = f"services and pools are not jobs; start this one with SkyPilot: `{use} FILE`"
            yield TaskProblem(key_lines[key], key, what)
    resources = dict(document.places(root))
    for where, place in resources.items():
        yield from _resource_problems(where, place, task)
    given = [key for key in document.ALTERNATIVES if key in resources.get("resources", {})]
    if len(given) > 1:
        where, what = f"resources.{given[1]}", f"expected one of {' and '.join(given)}, found both"
        yield TaskProblem(key_lines[where], where, what)
    for target in mounts if isinstance(mounts, dict) else ():
        if path_in_workdir(str(target)) == "":
            where = f"file_mounts.{target}"
            yield TaskProblem(
                key_lines[where], where, "this is the workdir itself; give its files as workdir"
            )


def _variable_problems(
    task: TaskDocument, where: str, option: str, given: Mapping[str, str]
) -> Iterator[TaskProblem]:
    """Yield problems of names that shells do not accept, and of variables without a value."""
    value = task.plain.get(where)
    named: list[tuple[str, Any, int]] = []
    if isinstance(value, dict):
        named = [(str(name), plain, task.key_lines[f"{where}.{name}"]) for name, plain in value.items()]
    elif isinstance(value, list):
        lines = [task.value_lines[f"{where}[{number}]"] for number in range(len(value))]
        named = [(str(name), None, line) for name, line in zip(value, lines, strict=True)]
    for name, plain, line in named:
        if not document.is_variable_name(name):
            yield TaskProblem(line, f"{where}.{name}", f"expected the name of a variable, found {name!r}")
        elif "\0" in str(plain):
            yield TaskProblem(line, f"{where}.{name}", "expected a text without NUL characters")
        elif plain is None and name not in given:
            how = f"{option} {name}=VALUE, or {option} {name} if this shell has it"
            what = f"{name} has no value: give it here, or with {how}"
            yield TaskProblem(line, f"{where}.{name}", what)


def _resource_problems(where: str, place: Mapping[str, Any], task: TaskDocument) -> Iterator[TaskProblem]:
    cpus, memory, priority = (place.get(key) for key in ("cpus", "memory", "priority"))
    accelerators = place.get("accelerators")
    found: dict[str, str] = {}
    if ACCELERATORS.fits(accelerators) and isinstance(read := parse_accelerators(accelerators), str):
        found["accelerators"] = read
    if cpus is not None and parse_cpus(cpus) is None:
        found["cpus"] = f"expected a number of CPUs, as 4 or 4+, found {cpus!r}"
    if memory is not None and not is_multiple(memory) and not memory_mib(memory):
        found["memory"] = f"expected an amount of memory, as 32, 32+ or 32GB, found {memory!r}"
    if isinstance(priority, int) and abs(priority) > MAX_PRIORITY:
        found["priority"] = f"expected {-MAX_PRIORITY} to {MAX_PRIORITY}, found {priority}"
    for key, what in found.items():
        yield TaskProblem(task.value_lines[f"{where}.{key}"], f"{where}.{key}", what)
    if "gpus" in place:
        what = "another name of accelerators, which is given too; remove one of them"
        yield TaskProblem(task.key_lines[f"{where}.gpus"], f"{where}.gpus", what)


def format_problems(problems: list[TaskProblem], name: str) -> str:
    """Return the message for the problems of a file, in the order of their lines."""
    ordered = sorted(set(problems), key=lambda problem: (problem.line, problem.where, problem.what))
    lines = [f"  {name}:{one.line}: {one.where}: {one.what}" for one in ordered[:_MAX_LISTED]]
    if len(ordered) > _MAX_LISTED:
        lines.append(f"  and {len(ordered) - _MAX_LISTED} more")
    return "\n".join(["The task file has errors. Nothing was started.", *lines])
