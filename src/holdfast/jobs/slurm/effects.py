"""Which keys of a task file mean something else on Slurm than they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.jobs.effects import find_effects, value_at
from holdfast.jobs.engine import Effect
from holdfast.jobs.slurm.options import FURTHER, memory_mib
from holdfast.jobs.task.contents import Task

_CHOICE = "Slurm chooses the nodes; kept for other engines"
_VOLUME = "no volumes are made; kept for other engines"
_EFFECTS: Mapping[str, str] = {
    "event_callback": "not called",
    "managed_secrets": "not fetched",
    "inputs": "not used",
    "outputs": "not used",
    "volumes": _VOLUME,
    "volume_mounts": _VOLUME,
    "api_server_access": "there is no API server",
    "resources.cloud": _CHOICE,
    "resources.region": _CHOICE,
    "resources.zone": _CHOICE,
    "resources.instance_type": _CHOICE,
    "resources.use_spot": "Slurm sells no spot machines; choose a partition that can be preempted, "
    f"as infra: slurm/CLUSTER/PARTITION or in {FURTHER}",
    "resources.job_recovery.strategy": "Slurm's queue decides where the job comes back",
    "resources.disk_size": "no disk is made; kept for other engines",
    "resources.disk_tier": "no disk is made; kept for other engines",
    "resources.network_tier": "the cluster's network as it is",
    "resources.local_disk": _CHOICE,
    "resources.max_hourly_cost": "nothing is bought here",
    "resources.ports": "no port is opened, and none is closed",
    "resources.labels": "no machine is labelled",
    "resources.accelerator_args": _CHOICE,
    "resources.image_id": f"commands run on the nodes as they are; for containers see {FURTHER}",
    "resources.autostop": "no machine is stopped",
    "resources.priority": f"not passed on; Slurm's own is an option of sbatch, see {FURTHER}",
    "resources.priority_class": f"not passed on; Slurm's own is an option of sbatch, see {FURTHER}",
    "resources.any_of": _CHOICE,
    "resources.ordered": _CHOICE,
    "resources.volumes": _VOLUME,
}


def effects(task: Task) -> list[Effect]:
    """The keys of a task that mean something else here, in the order of the file."""
    found = [*find_effects(task, _EFFECTS), *_sizes(task), *_choices(task), *_infra(task)]
    found += [*_config(task), *_buckets(task)]
    return sorted(found, key=lambda effect: effect.line)


def _line(task: Task, key: str) -> int:
    return task.lines.get(key, 1)


def _sizes(task: Task) -> Iterator[Effect]:
    memory = value_at(task.document, "resources.memory")
    if memory is not None and memory_mib(memory) is None:
        yield Effect("resources.memory", _line(task, "resources.memory"), "not passed on: no fixed amount")
    for key in ("resources.cpus", "resources.memory"):
        value = str(value_at(task.document, key) or "")
        if value.endswith("+"):
            yield Effect(key, _line(task, key), f"as {value[:-1]}: Slurm gives what is asked for, not more")


def _choices(task: Task) -> Iterator[Effect]:
    choices = task.accelerators.choices
    key = "resources.accelerators"
    if len(choices) > 1:
        what = f"only the first, {choices[0][0]}: sbatch takes no choice of GPUs"
        yield Effect(key, _line(task, key), what)
    elif choices:
        what = f"as --gres=gpu:{choices[0][0].lower()}:{int(choices[0][1])}; if the cluster calls its GPUs "
        yield Effect(key, _line(task, key), what + f"otherwise, give gres in {FURTHER}")


def _infra(task: Task) -> Iterator[Effect]:
    infra = value_at(task.document, "resources.infra")
    if infra is not None:
        parts = str(infra).split("/")
        is_slurm = parts[0].lower() == "slurm"
        what = f"the partition {parts[2]!r} of it" if is_slurm and len(parts) == 3 else _CHOICE
        yield Effect("resources.infra", _line(task, "resources.infra"), what)


def _config(task: Task) -> Iterator[Effect]:
    config: Any = task.document.get("config")
    for name in config if isinstance(config, Mapping) else ():
        if name != "slurm":
            what = "settings of clouds and clusters; kept unchanged for other engines"
            yield Effect(f"config.{name}", _line(task, f"config.{name}"), what)


def _buckets(task: Task) -> Iterator[Effect]:
    for mount in task.file_mounts:
        if mount.source is None and mount.bucket:
            what = f"a folder beside the jobs' own stands for the bucket {mount.bucket!r}"
            yield Effect(f"file_mounts.{mount.target}", mount.line, what)
