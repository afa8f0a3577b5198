"""Problems of a task: all keys and the shapes of their values are checked before any is reported.

Source: skypilot 0.14.1, sky/utils/schemas.py (task, resources, storage).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.jobs.task.amounts import is_multiple, memory_mib, parse_accelerators, parse_cpus
from holdfast.jobs.task.document import TaskProblem, Value
from holdfast.jobs.task.edits import ALTERNATIVES, fill_in_mounts, parse_variables, places, variable_problems
from holdfast.jobs.task.sky_workdir import path_in_workdir

MAX_PRIORITY = 1000  # and the least one without its sign. Source: skypilot, sky/skylet/constants.py
_MAX_LISTED = 10
MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
STORES = ("S3", "GCS", "AZURE", "R2", "IBM", "OCI", "NEBIUS", "COREWEAVE", "VASTDATA", "HF", "VOLUME")
DISK_TIERS = ("low", "medium", "high", "ultra", "best", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Valid values in one place of a task file; by default, all values."""

    kind: str = "any"  # or scalar, list, map
    name: str = "anything"  # description of the valid values, to follow the word "expected"
    types: tuple[type, ...] = ()  # of a scalar
    allowed: Collection[str] = ()  # if given: only these, in upper or lower case
    least: float | None = None
    inner: Shape | None = None  # of each item of a list, or each value of a map with keys that users choose
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of a map with a fixed set of keys, by key
    either: tuple[Shape, ...] = ()  # shapes of which a value must have one

    def is_near(self, value: Value) -> bool:
        """Return True if a value has the right kind or type."""
        if self.either:
            return any(shape.is_near(value) for shape in self.either)
        if self.kind != "scalar" or value.kind != "scalar":
            return self.kind in ("any", value.kind)
        is_other_flag = isinstance(value.plain, bool) and bool not in self.types
        return isinstance(value.plain, self.types) and not is_other_flag

    def fits(self, value: Value) -> bool:
        """Return True if a value has no problems."""
        return next(self.problems(value, ""), None) is None

    def problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        """Yield all problems of a value."""
        near = [shape for shape in self.either if shape.is_near(value)]
        if any(shape.fits(value) for shape in near):
            return
        if len(near) == 1:  # more specific
            yield from near[0].problems(value, where)
        elif self.either or not self.is_near(value):
            yield self._mismatch(value, where)
        elif self.kind == "scalar":
            yield from self._limit_problems(value, where)
        elif self.kind == "list" and self.inner:
            for number, item in enumerate(value.items):
                yield from self.inner.problems(item, f"{where}[{number}]")
        elif self.kind == "map":
            yield from self._key_problems(value, where)

    def _limit_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        found = str(value.plain)
        if self.allowed and found.lower() not in {one.lower() for one in self.allowed}:
            what = f"expected {self.name}, found {found!r}{nearest(found, self.allowed)}"
            yield TaskProblem(value.line, where, what)
        elif self.least is not None and value.plain < self.least:
            yield self._mismatch(value, where, f", at least {self.least:g}")

    def _key_problems(self, value: Value, where: str) -> Iterator[TaskProblem]:
        for key, member in value.members.items():
            path = f"{where}.{key}" if where else key
            if shape := self.shapes.get(key, self.inner):
                yield from shape.problems(member, path)
                continue
            place = f"in {where}" if where else "at the top of a task"
            hint = nearest(key, self.shapes) or f" Expected one of: {', '.join(self.shapes)}."
            yield TaskProblem(value.key_lines[key], path, f"unknown key {key!r} {place}.{hint}")

    def _mismatch(self, value: Value, where: str, detail: str = "") -> TaskProblem:
        found = repr(value.plain)
        if value.kind != "scalar":
            found = f"a {value.kind}"
        elif value.plain is None:
            found = "nothing"
        elif len(found) > 60:
            found = found[:57] + "..."
        return TaskProblem(value.line, where, f"expected {self.name}{detail}, found {found}")


def scalar(name: str, *types: type, least: float | None = None) -> Shape:
    """Return the shape of a scalar of some types."""
    return Shape(kind="scalar", name=name, types=types, least=least)


def word_of(*allowed: str) -> Shape:
    """Return the shape of a text that is one of some words."""
    return Shape(kind="scalar", name=f"one of {', '.join(allowed)}", types=(str,), allowed=allowed)


def either(*shapes: Shape) -> Shape:
    """Return the shape of values that have one of several shapes."""
    name = " or ".join(dict.fromkeys(shape.name for shape in shapes if shape is not NOTHING))
    return Shape(name=name, either=shapes)


def optional(*shapes: Shape) -> Shape:
    """Return the shape of a value that has one of several shapes, or is empty."""
    return either(*shapes, NOTHING)


def list_of(item: Shape) -> Shape:
    """Return the shape of a list of one shape."""
    return Shape(kind="list", name=f"a list of {item.name}", inner=item)


def map_to(member: Shape) -> Shape:
    """Return the shape of a map with keys that users choose."""
    return Shape(kind="map", name=f"a map to {member.name}", inner=member)


def keys(shapes: Mapping[str, Shape], name: str = "a map") -> Shape:
    """Return the shape of a map with a fixed set of keys."""
    return Shape(kind="map", name=name, shapes=shapes)


ANYTHING = Shape()
NOTHING = scalar("nothing", type(None))
TEXT = scalar("text", str)
FLAG = scalar("true or false", bool)
WHOLE = scalar("a whole number", int)
COUNT = scalar("a whole number", int, least=1)
NUMBER = scalar("a number", int, float)


def nearest(found: str, known: Collection[str]) -> str:
    """Return a question with the most similar valid word, or an empty string."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(found.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


_SIZE = either(NUMBER, TEXT)  # 32, 32+, 32GB
_WORD = either(TEXT, NUMBER)

STORAGE: Mapping[str, Shape] = {
    "name": optional(TEXT),
    "source": optional(TEXT, list_of(TEXT)),
    "store": optional(word_of(*STORES)),
    "persistent": FLAG,
    "mode": word_of(*MODES),
    "type": word_of("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW"),
    "config": keys({"mount_cached": ANYTHING, "mount": ANYTHING}),
    "_is_sky_managed": FLAG,
    "_bucket_sub_path": optional(TEXT),
    "_force_delete": FLAG,
}
"""Keys of a store in `file_mounts`."""

JOB_RECOVERY: Mapping[str, Shape] = {
    "strategy": optional(TEXT),
    "max_restarts_on_errors": scalar("a whole number", int, least=0),
    "recover_on_exit_codes": either(WHOLE, list_of(WHOLE)),
}
"""Keys of `resources.job_recovery`."""

ACCELERATORS = optional(TEXT, map_to(optional(NUMBER)), list_of(TEXT))  # accelerators in any form
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
    "job_recovery": optional(TEXT, keys(JOB_RECOVERY)),
    "spot_recovery": optional(TEXT),
    "volumes": ANYTHING,
    "disk_size": _SIZE,
    "disk_tier": optional(word_of(*DISK_TIERS)),
    "network_tier": optional(word_of("standard", "best")),
    "local_disk": optional(TEXT),
    "max_hourly_cost": optional(NUMBER),
    "ports": optional(_WORD, list_of(_WORD)),
    "labels": optional(map_to(optional(_WORD))),
    "accelerator_args": optional(map_to(ANYTHING)),
    "image_id": optional(TEXT, map_to(optional(TEXT))),
    "autostop": optional(FLAG, _WORD, map_to(ANYTHING)),
    "priority": optional(WHOLE),
    "priority_class": optional(TEXT),
    "_docker_login_config": ANYTHING,
    "_docker_username_for_runpod": ANYTHING,
    "_requires_fuse": ANYTHING,
    "_cluster_config_overrides": ANYTHING,
    "_no_missing_accel_warnings": ANYTHING,
}
RESOURCES: Mapping[str, Shape] = {
    **_SINGLE,
    "any_of": list_of(keys(_SINGLE, "a map of resources")),
    "ordered": list_of(keys(_SINGLE, "a map of resources")),
}
"""Keys of `resources`."""

_VARIABLES = map_to(optional(TEXT, NUMBER, FLAG))

TASK = keys(
    {
        "name": optional(_WORD),
        "workdir": optional(TEXT, keys({"url": TEXT, "ref": optional(_WORD)})),
        "event_callback": optional(TEXT),
        "num_nodes": COUNT,
        "resources": optional(keys(RESOURCES, "a map of resources")),
        "file_mounts": optional(map_to(either(TEXT, keys(STORAGE, "a map that describes a store")))),
        "service": ANYTHING,
        "pool": ANYTHING,
        "setup": optional(TEXT),
        "run": optional(TEXT),
        "envs": optional(_VARIABLES),
        "secrets": optional(_VARIABLES, list_of(TEXT)),
        "managed_secrets": ANYTHING,
        "inputs": ANYTHING,
        "outputs": ANYTHING,
        "file_mounts_mapping": ANYTHING,
        "config": optional(map_to(ANYTHING)),
        "volumes": optional(map_to(ANYTHING)),
        "volume_mounts": ANYTHING,
        "api_server_access": ANYTHING,
        "_metadata": ANYTHING,
    },
    "a map of keys",
)
"""A task."""


def find_problems(root: Value, envs: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[TaskProblem]:
    """Yield the problems of a task whose aliases are replaced; the command line may add variables."""
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
    for where, place in places(resources):
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


def format_problems(problems: list[TaskProblem], name: str) -> str:
    """Return the message for the problems of a file, in the order of their lines."""
    ordered = sorted(set(problems), key=lambda one: (one.line, one.where, one.what))
    lines = [f"  {name}:{one.line}: {one.where}: {one.what}" for one in ordered[:_MAX_LISTED]]
    if len(ordered) > _MAX_LISTED:
        lines.append(f"  and {len(ordered) - _MAX_LISTED} more")
    return "\n".join(["The task file has errors. Nothing was started.", *lines])
