"""Task-file keys that Slurm ignores or interprets differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.jobs.engine import UnsupportedKey
from holdfast.jobs.node.mounts.private_targets import private_mounts, private_note
from holdfast.jobs.slurm.options import FURTHER
from holdfast.jobs.task.amounts import memory_mib
from holdfast.jobs.task.model import Task
from holdfast.jobs.unsupported_keys import (
    CHOICE_KEYS,
    UNUSED_KEYS,
    find_cache_settings,
    find_mounts_in_place,
    find_shell_differences,
    find_unsupported_keys,
    value_at,
)

_CHOICE = "Slurm chooses the nodes; kept for other engines"
_UNSUPPORTED_KEYS: Mapping[str, str] = {
    **UNUSED_KEYS,
    **dict.fromkeys(CHOICE_KEYS, _CHOICE),
    "resources.use_spot": "Slurm has no spot machines; choose a preemptible partition, "
    f"as infra: slurm/CLUSTER/PARTITION or in {FURTHER}",
    "resources.job_recovery.strategy": "Slurm's queue chooses the nodes",
    "resources.network_tier": "the cluster's network as it is",
    "resources.labels": "no machine is labelled",
    "resources.image_id": "commands run on the nodes as they are; images (docker:NAME) need podman or docker "
    f"on the nodes, others an option of your cluster in {FURTHER}",
    "resources.autostop": "no machine is stopped",
    "resources.priority": f"not passed on; use sbatch's own option, see {FURTHER}",
    "resources.priority_class": f"not passed on; use sbatch's own option, see {FURTHER}",
}


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return the keys of a task that this engine ignores or changes, in file order."""
    found = [*find_unsupported_keys(task, _UNSUPPORTED_KEYS), *_sizes(task), *_choices(task), *_infra(task)]
    if task.image is not None:
        found = [one for one in found if one.key != "resources.image_id"]
    found += [*_config(task), *_buckets(task), *find_mounts_in_place(task), *find_cache_settings(task)]
    found += find_shell_differences(task)
    found += [
        UnsupportedKey(f"file_mounts.{one.target}", one.line, private_note()) for one in private_mounts(task)
    ]
    return sorted(found, key=lambda found_key: found_key.line)


def _line(task: Task, key: str) -> int:
    return task.lines.get(key, 1)


def _sizes(task: Task) -> Iterator[UnsupportedKey]:
    memory = value_at(task.document, "resources.memory")
    if memory is not None and memory_mib(memory) is None:
        yield UnsupportedKey(
            "resources.memory", _line(task, "resources.memory"), "not passed on: not a fixed amount"
        )
    for key in ("resources.cpus", "resources.memory"):
        value = str(value_at(task.document, key) or "")
        if value.endswith("+"):
            yield UnsupportedKey(
                key, _line(task, key), f"as {value[:-1]}: Slurm allocates exactly what is requested"
            )


def _choices(task: Task) -> Iterator[UnsupportedKey]:
    choices = task.accelerators.choices
    key = "resources.accelerators"
    if len(choices) > 1:
        what = f"only the first, {choices[0][0]}: sbatch does not support alternatives of GPUs"
        yield UnsupportedKey(key, _line(task, key), what)
    elif choices:
        what = f"as --gres=gpu:{choices[0][0].lower()}:{int(choices[0][1])}; if the cluster calls its GPUs "
        yield UnsupportedKey(key, _line(task, key), what + f"otherwise, give gres in {FURTHER}")


def _infra(task: Task) -> Iterator[UnsupportedKey]:
    infra = value_at(task.document, "resources.infra")
    if infra is not None:
        parts = str(infra).split("/")
        is_slurm = parts[0].lower() == "slurm"
        what = f"the partition {parts[2]!r} of it" if is_slurm and len(parts) == 3 else _CHOICE
        yield UnsupportedKey("resources.infra", _line(task, "resources.infra"), what)


def _config(task: Task) -> Iterator[UnsupportedKey]:
    config: Any = task.document.get("config")
    for name in config if isinstance(config, Mapping) else ():
        if name != "slurm":
            what = "settings of clouds and clusters; kept for other engines"
            yield UnsupportedKey(f"config.{name}", _line(task, f"config.{name}"), what)


def _buckets(task: Task) -> Iterator[UnsupportedKey]:
    for mount in task.file_mounts:
        if mount.source is None and mount.bucket:
            what = f"a folder beside those of the jobs replaces the bucket {mount.bucket!r}"
            yield UnsupportedKey(f"file_mounts.{mount.target}", mount.line, what)
