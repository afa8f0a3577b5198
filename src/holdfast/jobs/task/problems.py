"""Problems of a task: all keys and the shapes of their values are checked before any is reported.

Source: skypilot 0.14.1, sky/utils/schemas.py (task, resources, storage).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import override

from holdfast.jobs.task.amounts import is_multiple, memory_mib, parse_accelerators, parse_cpus
from holdfast.jobs.task.document import TaskProblem, Value
from holdfast.jobs.task.edits import ALTERNATIVES, fill_in_mounts, parse_variables, variable_problems
from holdfast.jobs.task.sky_workdir import path_in_workdir

MAX_PRIORITY = 1000
"""Greatest priority, and the least one without its sign. Source: skypilot, sky/skylet/constants.py."""
_MAX_LISTED = 10
MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
STORES = ("S3", "GCS", "AZURE", "R2", "IBM", "OCI", "NEBIUS", "COREWEAVE", "VASTDATA", "HF", "VOLUME")
DISK_TIERS = ("low", "medium", "high", "ultra", "best", "none")

# -- shapes ----------------------------------------------------------------------------------------------


class Shape:
    """Valid values in one place of a task file: of this class, all values."""

    def describe(self) -> str:
        """Return a description of valid values, to follow the word "expected"."""
        return "anything"

    def is_near(self, value: Value) -> bool:
        """Return True if a value has the right kind or type."""
        return True

    def inner_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        """Yield the problems of a value of the right kind."""
        yield from ()

    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        """Yield all problems of a value."""
        if self.is_near(value):
            yield from self.inner_problems(value, where)
        else:
            yield self.mismatch(value, where)

    def fits(self, value: Value) -> bool:
        """Return True if a value has no problems."""
        return next(self.problems(value, ""), None) is None

    def mismatch(self, value: Value, where: str, detail: str = "") -> TaskProblem:
        """Return the problem of a value that is not as expected."""
        found = repr(value.plain)
        if value.kind != "scalar":
            found = f"a {value.kind}"
        elif value.plain is None:
            found = "nothing"
        elif len(found) > 60:
            found = found[:57] + "..."
        return TaskProblem(value.line, where, f"expected {self.describe()}{detail}, found {found}")


@dataclass(frozen=True, slots=True)
class Scalar(Shape):
    """Scalar of some types."""

    types: tuple[type, ...]
    name: str
    allowed: Collection[str] = ()  # if given: only these, in upper or lower case
    least: float | None = None

    @override
    def describe(self) -> str:
        return f"one of {', '.join(self.allowed)}" if self.allowed else self.name

    @override
    def is_near(self, value: Value) -> bool:
        if value.kind != "scalar" or (isinstance(value.plain, bool) and bool not in self.types):
            return False
        return isinstance(value.plain, self.types)

    @override
    def inner_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        found = str(value.plain)
        if self.allowed and found.lower() not in {one.lower() for one in self.allowed}:
            what = f"expected {self.describe()}, found {found!r}{nearest(found, self.allowed)}"
            yield TaskProblem(value.line, where, what)
        elif self.least is not None and isinstance(value.plain, (int, float)) and value.plain < self.least:
            yield self.mismatch(value, where, f", at least {self.least:g}")


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
    def describe(self) -> str:
        names = [shape.describe() for shape in self.shapes if shape is not NOTHING]
        return " or ".join(dict.fromkeys(names))

    @override
    def is_near(self, value: Value) -> bool:
        return any(shape.is_near(value) for shape in self.shapes)

    @override
    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        # Problems of the shape of the value's kind are more specific, if there is exactly one.
        if any(shape.fits(value) for shape in self.shapes):
            return
        near = [shape for shape in self.shapes if shape.is_near(value)]
        if len(near) == 1:
            yield from near[0].problems(value, where)
        else:
            yield self.mismatch(value, where)


def optional(shape: Shape) -> Shape:
    """Return a shape that also accepts an empty value."""
    return Either((shape, NOTHING))


@dataclass(frozen=True, slots=True)
class ListOf(Shape):
    """List of one shape."""

    item: Shape

    @override
    def describe(self) -> str:
        return f"a list of {self.item.describe()}"

    @override
    def is_near(self, value: Value) -> bool:
        return value.kind == "list"

    @override
    def inner_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        for number, item in enumerate(value.items):
            yield from self.item.problems(item, f"{where}[{number}]")


@dataclass(frozen=True, slots=True)
class MapOf(Shape):
    """Map with keys that users choose."""

    member: Shape

    @override
    def describe(self) -> str:
        return f"a map to {self.member.describe()}"

    @override
    def is_near(self, value: Value) -> bool:
        return value.kind == "map"

    @override
    def inner_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        for key, member in value.members.items():
            yield from self.member.problems(member, f"{where}.{key}")


@dataclass(frozen=True, slots=True)
class Keys(Shape):
    """Map with a fixed set of keys."""

    shapes: Mapping[str, Shape]
    name: str = "a map"

    @override
    def describe(self) -> str:
        return self.name

    @override
    def is_near(self, value: Value) -> bool:
        return value.kind == "map"

    @override
    def inner_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        for key, member in value.members.items():
            path = f"{where}.{key}" if where else key
            if key in self.shapes:
                yield from self.shapes[key].problems(member, path)
                continue
            place = f"in {where}" if where else "at the top of a task"
            hint = nearest(key, self.shapes) or f" Expected one of: {', '.join(self.shapes)}."
            yield TaskProblem(value.key_lines[key], path, f"unknown key {key!r} {place}.{hint}")


def nearest(found: str, known: Collection[str]) -> str:
    """Return a question with the most similar valid word, or an empty string."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(found.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


# -- keys ------------------------------------------------------------------------------------------------

_SIZE = Either((NUMBER, TEXT))  # 32, 32+, 32GB
_WORD = Either((TEXT, NUMBER))

STORAGE: Mapping[str, Shape] = {
    "name": optional(TEXT),
    "source": optional(Either((TEXT, ListOf(TEXT)))),
    "store": optional(Scalar((str,), "the name of a store", allowed=STORES)),
    "persistent": FLAG,
    "mode": Scalar((str,), "a mode", allowed=MODES),
    "type": Scalar(
        (str,), "a type", allowed=("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW")
    ),
    "config": Keys({"mount_cached": Shape(), "mount": Shape()}),
    "_is_sky_managed": FLAG,
    "_bucket_sub_path": optional(TEXT),
    "_force_delete": FLAG,
}
"""Keys of a store in `file_mounts`."""

JOB_RECOVERY: Mapping[str, Shape] = {
    "strategy": optional(TEXT),
    "max_restarts_on_errors": Scalar((int,), "a whole number", least=0),
    "recover_on_exit_codes": Either((WHOLE, ListOf(WHOLE))),
}
"""Keys of `resources.job_recovery`."""

ACCELERATORS = optional(Either((TEXT, MapOf(optional(NUMBER)), ListOf(TEXT))))  # accelerators in any form
_SINGLE: dict[str, Shape] = {
    "cloud": optional(TEXT),
    "region": optional(TEXT),
    "zone": optional(TEXT),
    "infra": optional(TEXT),
    "cpus": optional(_WORD),
    "memory": optional(_SIZE),
    "accelerators": ACCELERATORS,
    "gpus": ACCELERATORS,
    "instance_type": optional(TEXT),
    "use_spot": FLAG,
    "job_recovery": optional(Either((TEXT, Keys(JOB_RECOVERY)))),
    "spot_recovery": optional(TEXT),
    "volumes": Shape(),
    "disk_size": _SIZE,
    "disk_tier": optional(Scalar((str,), "a disk tier", allowed=DISK_TIERS)),
    "network_tier": optional(Scalar((str,), "a network tier", allowed=("standard", "best"))),
    "local_disk": optional(TEXT),
    "max_hourly_cost": optional(NUMBER),
    "ports": optional(Either((_WORD, ListOf(_WORD)))),
    "labels": optional(MapOf(optional(_WORD))),
    "accelerator_args": optional(MapOf(Shape())),
    "image_id": optional(Either((TEXT, MapOf(optional(TEXT))))),
    "autostop": optional(Either((FLAG, _WORD, MapOf(Shape())))),
    "priority": optional(WHOLE),
    "priority_class": optional(TEXT),
    "_docker_login_config": Shape(),
    "_docker_username_for_runpod": Shape(),
    "_requires_fuse": Shape(),
    "_cluster_config_overrides": Shape(),
    "_no_missing_accel_warnings": Shape(),
}
RESOURCES: Mapping[str, Shape] = {
    **_SINGLE,
    "any_of": ListOf(Keys(_SINGLE, "a map of resources")),
    "ordered": ListOf(Keys(_SINGLE, "a map of resources")),
}
"""Keys of `resources`."""

_VARIABLES = MapOf(optional(Either((TEXT, NUMBER, FLAG))))

TASK = Keys(
    {
        "name": optional(_WORD),
        "workdir": optional(Either((TEXT, Keys({"url": TEXT, "ref": optional(_WORD)})))),
        "event_callback": optional(TEXT),
        "num_nodes": COUNT,
        "resources": optional(Keys(RESOURCES, "a map of resources")),
        "file_mounts": optional(MapOf(Either((TEXT, Keys(STORAGE, "a map that describes a store"))))),
        "service": Shape(),
        "pool": Shape(),
        "setup": optional(TEXT),
        "run": optional(TEXT),
        "envs": optional(_VARIABLES),
        "secrets": optional(Either((_VARIABLES, ListOf(TEXT)))),
        "managed_secrets": Shape(),
        "inputs": Shape(),
        "outputs": Shape(),
        "file_mounts_mapping": Shape(),
        "config": optional(MapOf(Shape())),
        "volumes": optional(MapOf(Shape())),
        "volume_mounts": Shape(),
        "api_server_access": Shape(),
        "_metadata": Shape(),
    },
    "a map of keys",
)
"""A task."""


def find_problems(root: Value, envs: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[TaskProblem]:
    """Yield the problems of a task whose aliases are replaced.

    Args:
        envs, secrets: variables of the command line, which the task may lack.
    """
    # SkyPilot too replaces variables first. Values of secrets stay out of messages.
    is_map = root.kind == "map"
    filled = fill_in_mounts(root, parse_variables(root.get("envs"), envs)) if is_map else root
    yield from TASK.problems(filled, "")
    if not is_map:
        return
    if not (root.members.keys() & {"pool", "service"} or root.get("run").plain):
        yield TaskProblem(root.line, "run", "expected the commands of the job, found nothing")
    for key, option, chosen in (("envs", "--env", envs), ("secrets", "--secret", secrets)):
        yield from variable_problems(root.get(key), chosen, where=key, option=option)
    for key, use in (("service", "sky serve up"), ("pool", "sky jobs pool apply")):
        if key in root.members:
            what = f"services and pools are not jobs; start this one with SkyPilot: `{use} FILE`"
            yield TaskProblem(root.key_lines[key], key, what)
    yield from _resource_problems(root.get("resources"))
    for target, line in root.get("file_mounts").key_lines.items():
        if path_in_workdir(target) == "":
            what = "this is the workdir itself; give its files as workdir"
            yield TaskProblem(line, f"file_mounts.{target}", what)


def _resource_problems(resources: Value) -> Iterator[TaskProblem]:
    for where, place in _places(resources):
        asked = place.get("accelerators")
        read = parse_accelerators(asked.plain) if ACCELERATORS.fits(asked) else None
        if isinstance(read, str):
            yield TaskProblem(asked.line, f"{where}.accelerators", read)
        yield from _amount_problems(where, place)
        if "gpus" in place.members:
            what = "another name of accelerators, which is given too; remove one of them"
            yield TaskProblem(place.key_lines["gpus"], f"{where}.gpus", what)
    given = [key for key in ALTERNATIVES if key in resources.members]
    if len(given) > 1:
        what = f"expected one of {' and '.join(given)}, found both"
        yield TaskProblem(resources.key_lines[given[1]], f"resources.{given[1]}", what)


def _amount_problems(where: str, place: Value) -> Iterator[TaskProblem]:
    cpus, memory, priority = (place.get(key) for key in ("cpus", "memory", "priority"))
    if cpus.plain is not None and parse_cpus(cpus.plain) is None:
        what = f"expected a number of CPUs, as 4 or 4+, found {cpus.plain!r}"
        yield TaskProblem(cpus.line, f"{where}.cpus", what)
    if memory.plain is not None and not is_multiple(memory.plain) and not memory_mib(memory.plain):
        what = f"expected an amount of memory, as 32, 32+ or 32GB, found {memory.plain!r}"
        yield TaskProblem(memory.line, f"{where}.memory", what)
    if isinstance(priority.plain, int) and abs(priority.plain) > MAX_PRIORITY:
        what = f"expected {-MAX_PRIORITY} to {MAX_PRIORITY}, found {priority.plain}"
        yield TaskProblem(priority.line, f"{where}.priority", what)


def _places(resources: Value) -> Iterator[tuple[str, Value]]:
    """Yield the resources and their alternatives, with their paths."""
    yield "resources", resources
    for key in ALTERNATIVES:
        for number, item in enumerate(resources.get(key).items):
            yield f"resources.{key}[{number}]", item


def format_problems(problems: list[TaskProblem], name: str) -> str:
    """Return the message for the problems of a file, in the order of their lines."""
    ordered = sorted(set(problems), key=lambda one: (one.line, one.where, one.what))
    lines = [f"{name}:{one.line}: {one.where}: {one.what}" for one in ordered[:_MAX_LISTED]]
    if len(ordered) > _MAX_LISTED:
        lines.append(f"and {len(ordered) - _MAX_LISTED} more")
    head = "The task file has errors. Nothing was started."
    return "\n".join([head, *(f"  {line}" for line in lines)])
