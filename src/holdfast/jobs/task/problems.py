"""Problems of a task: all keys and the shapes of their values are checked before any is reported.

Source: skypilot 0.14.1, sky/utils/schemas.py (task, resources, storage).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.jobs.task.amounts import is_multiple, memory_mib, parse_accelerators, parse_cpus
from holdfast.jobs.task.document import Value
from holdfast.jobs.task.edits import ALTERNATIVES, fill_in_mounts, parse_variables, variable_problems
from holdfast.jobs.task.shape import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    WHOLE,
    Anything,
    Either,
    Keys,
    ListOf,
    MapOf,
    Scalar,
    Shape,
    TaskProblem,
    optional,
)
from holdfast.jobs.task.sky_workdir import path_in_workdir

MAX_PRIORITY = 1000
"""Greatest priority, and the least one without its sign. Source: skypilot, sky/skylet/constants.py."""
_MAX_LISTED = 10
MODES = ("MOUNT", "COPY", "MOUNT_CACHED")
STORES = ("S3", "GCS", "AZURE", "R2", "IBM", "OCI", "NEBIUS", "COREWEAVE", "VASTDATA", "HF", "VOLUME")
DISK_TIERS = ("low", "medium", "high", "ultra", "best", "none")
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
    "config": Keys({"mount_cached": Anything(), "mount": Anything()}),
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

ACCELERATORS = optional(Either((TEXT, MapOf(optional(NUMBER)), ListOf(TEXT))))
"""Accelerators in any form."""
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
    "volumes": Anything(),
    "disk_size": _SIZE,
    "disk_tier": optional(Scalar((str,), "a disk tier", allowed=DISK_TIERS)),
    "network_tier": optional(Scalar((str,), "a network tier", allowed=("standard", "best"))),
    "local_disk": optional(TEXT),
    "max_hourly_cost": optional(NUMBER),
    "ports": optional(Either((_WORD, ListOf(_WORD)))),
    "labels": optional(MapOf(optional(_WORD))),
    "accelerator_args": optional(MapOf(Anything())),
    "image_id": optional(Either((TEXT, MapOf(optional(TEXT))))),
    "autostop": optional(Either((FLAG, _WORD, MapOf(Anything())))),
    "priority": optional(WHOLE),
    "priority_class": optional(TEXT),
    "_docker_login_config": Anything(),
    "_docker_username_for_runpod": Anything(),
    "_requires_fuse": Anything(),
    "_cluster_config_overrides": Anything(),
    "_no_missing_accel_warnings": Anything(),
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
        "service": Anything(),
        "pool": Anything(),
        "setup": optional(TEXT),
        "run": optional(TEXT),
        "envs": optional(_VARIABLES),
        "secrets": optional(Either((_VARIABLES, ListOf(TEXT)))),
        "managed_secrets": Anything(),
        "inputs": Anything(),
        "outputs": Anything(),
        "file_mounts_mapping": Anything(),
        "config": optional(MapOf(Anything())),
        "volumes": optional(MapOf(Anything())),
        "volume_mounts": Anything(),
        "api_server_access": Anything(),
        "_metadata": Anything(),
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
    yield from TASK.problems(_with_variables(root, envs), "")
    if root.kind != "map":
        return
    run = root.get("run")
    if root.get("pool") is None and root.get("service") is None and (run is None or not run.plain):
        yield TaskProblem(root.line, "run", "expected the commands of the job, found nothing")
    for key, option in (("envs", "--env"), ("secrets", "--secret")):
        chosen = envs if key == "envs" else secrets
        yield from variable_problems(root.get(key), chosen, where=key, option=option)
    for key, use in (("service", "sky serve up"), ("pool", "sky jobs pool apply")):
        if root.get(key) is not None:
            what = f"services and pools are not jobs; start this one with SkyPilot: `{use} FILE`"
            yield TaskProblem(root.key_lines[key], key, what)
    yield from _resource_problems(root.get("resources"))
    mounts = root.get("file_mounts")
    for target, line in mounts.key_lines.items() if mounts is not None else ():
        if path_in_workdir(target) == "":
            what = "this is the workdir itself; give its files as workdir"
            yield TaskProblem(line, f"file_mounts.{target}", what)


def _with_variables(root: Value, envs: Mapping[str, str]) -> Value:
    if root.kind != "map":
        return root
    return fill_in_mounts(root, parse_variables(root.get("envs"), envs))


def _resource_problems(resources: Value | None) -> Iterator[TaskProblem]:
    if resources is None or resources.kind != "map":
        return
    for where, place in _places(resources):
        asked = place.get("accelerators")
        read = parse_accelerators(asked.plain) if asked is not None and ACCELERATORS.fits(asked) else None
        if asked is not None and isinstance(read, str):
            yield TaskProblem(asked.line, f"{where}.accelerators", read)
        yield from _amount_problems(where, place)
        priority = place.get("priority")
        if priority is not None and _is_beyond(priority.plain):
            what = f"expected {-MAX_PRIORITY} to {MAX_PRIORITY}, found {priority.plain}"
            yield TaskProblem(priority.line, f"{where}.priority", what)
        if place.get("gpus") is not None:
            what = "another name of accelerators, which is given too; remove one of them"
            yield TaskProblem(place.key_lines["gpus"], f"{where}.gpus", what)
    given = [key for key in ALTERNATIVES if resources.get(key) is not None]
    if len(given) > 1:
        what = f"expected one of {' and '.join(given)}, found both"
        yield TaskProblem(resources.key_lines[given[1]], f"resources.{given[1]}", what)


def _amount_problems(where: str, place: Value) -> Iterator[TaskProblem]:
    cpus, memory = place.get("cpus"), place.get("memory")
    if cpus is not None and cpus.plain is not None and parse_cpus(cpus.plain) is None:
        what = f"expected a number of CPUs, as 4 or 4+, found {cpus.plain!r}"
        yield TaskProblem(cpus.line, f"{where}.cpus", what)
    if memory is None or memory.plain is None or is_multiple(memory.plain):
        return
    if not memory_mib(memory.plain):
        what = f"expected an amount of memory, as 32, 32+ or 32GB, found {memory.plain!r}"
        yield TaskProblem(memory.line, f"{where}.memory", what)


def _is_beyond(priority: Any) -> bool:
    return isinstance(priority, int) and abs(priority) > MAX_PRIORITY


def _places(resources: Value) -> Iterator[tuple[str, Value]]:
    """Yield the resources and their alternatives, with their paths."""
    yield "resources", resources
    for key in ALTERNATIVES:
        member = resources.get(key)
        for number, item in enumerate(member.items if member is not None else ()):
            yield f"resources.{key}[{number}]", item


def format_problems(problems: list[TaskProblem], name: str) -> str:
    """Return the message for the problems of a file, in the order of their lines."""
    ordered = sorted(set(problems), key=lambda one: (one.line, one.where, one.what))
    lines = [f"{name}:{one.line}: {one.where}: {one.what}" for one in ordered[:_MAX_LISTED]]
    if len(ordered) > _MAX_LISTED:
        lines.append(f"and {len(ordered) - _MAX_LISTED} more")
    head = "The task file has errors. Nothing was started."
    return "\n".join([head, *(f"  {line}" for line in lines)])
