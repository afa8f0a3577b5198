"""Task-file keys that a single machine ignores or interprets differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.jobs.engine import UnsupportedKey
from holdfast.jobs.node.mounts.private_targets import private_mounts, private_note
from holdfast.jobs.task.model import Task
from holdfast.jobs.unsupported_keys import (
    CHOICE_KEYS,
    UNUSED_KEYS,
    find_cache_settings,
    find_mounts_in_place,
    find_shell_differences,
    find_unsupported_keys,
)

_CHOICE = "ignored: there is no choice of machines; kept for other engines"
_ALTERNATIVES = (
    "no choice of machines; SKYPILOT_NUM_GPUS_PER_NODE is the greatest number of GPUs in any of them"
)
_IMAGE = "resources.image_id"
_KEPT_FREE = "not given to other jobs, and not limited"
_UNSUPPORTED_KEYS: Mapping[str, str] = {
    **UNUSED_KEYS,
    **dict.fromkeys(CHOICE_KEYS, _CHOICE),
    **dict.fromkeys(("resources.any_of", "resources.ordered"), _ALTERNATIVES),
    "config": "settings of clouds and clusters; kept for other engines",
    "resources.infra": _CHOICE,
    "resources.cpus": f"{_KEPT_FREE}; more than this machine has means all of them",
    "resources.memory": f"{_KEPT_FREE}; more than this machine has means all of it",
    "resources.accelerators": "any GPUs of this machine, whatever their model; none if it has none",
    "resources.use_spot": "nothing is bought; `holdfast preempt` simulates a preemption",
    "resources.job_recovery.strategy": "ignored: there is only one machine",
    "resources.network_tier": "nodes communicate over the loopback interface",
    "resources.labels": "no machine is labelled",
    _IMAGE: "commands run on this machine as it is; images (docker:NAME) need podman or docker",
    "resources.autostop": "this machine is not stopped",
    "resources.priority_class": "ignored: use priority",
}


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return the keys of a task that this engine ignores or changes, in file order."""
    found = [*find_unsupported_keys(task, _UNSUPPORTED_KEYS), *_buckets(task)]
    found += [*find_mounts_in_place(task), *find_cache_settings(task), *find_shell_differences(task)]
    if task.image is not None:
        found = [one for one in found if one.key != _IMAGE]
    found += [
        UnsupportedKey(f"file_mounts.{one.target}", one.line, private_note()) for one in private_mounts(task)
    ]
    return sorted(found, key=lambda found_key: found_key.line)


def _buckets(task: Task) -> Iterator[UnsupportedKey]:
    for mount in task.file_mounts:
        if mount.source is None and mount.bucket:
            what = f"a folder of this machine replaces the bucket {mount.bucket!r}"
            yield UnsupportedKey(f"file_mounts.{mount.target}", mount.line, what)
