"""Which keys of a task file mean less on one machine than they say, and what is done with them instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.jobs.effects import find_effects
from holdfast.jobs.engine import Effect
from holdfast.jobs.task.contents import Task

_CHOICE = "no machine is chosen here; kept for other engines"
_EFFECTS: Mapping[str, str] = {
    "event_callback": "not called",
    "managed_secrets": "not fetched",
    "inputs": "not used",
    "outputs": "not used",
    "volumes": "no volumes are made; kept for other engines",
    "volume_mounts": "no volumes are made; kept for other engines",
    "api_server_access": "there is no API server",
    "config": "settings of clouds and clusters; kept unchanged for other engines",
    "resources.cloud": _CHOICE,
    "resources.region": _CHOICE,
    "resources.zone": _CHOICE,
    "resources.infra": _CHOICE,
    "resources.cpus": "not checked, and no limit",
    "resources.memory": "not checked, and no limit",
    "resources.accelerators": "not checked; the job is told how many per node in SKYPILOT_NUM_GPUS_PER_NODE",
    "resources.instance_type": _CHOICE,
    "resources.use_spot": "nothing is bought here; `holdfast preempt` plays the cloud's part",
    "resources.job_recovery.strategy": "there is one machine to come back to",
    "resources.disk_size": "no disk is made; kept for other engines",
    "resources.disk_tier": "no disk is made; kept for other engines",
    "resources.network_tier": "nodes meet on the loopback interface",
    "resources.local_disk": _CHOICE,
    "resources.max_hourly_cost": "nothing is bought here",
    "resources.ports": "no port is opened, and none is closed",
    "resources.labels": "no machine is labelled",
    "resources.accelerator_args": _CHOICE,
    "resources.image_id": "commands run on this machine as it is",
    "resources.autostop": "this machine is not stopped",
    "resources.priority": "jobs do not wait for each other here",
    "resources.priority_class": "jobs do not wait for each other here",
    "resources.any_of": _CHOICE,
    "resources.ordered": _CHOICE,
    "resources.volumes": "no volumes are made; kept for other engines",
}


def effects(task: Task) -> list[Effect]:
    """The keys of a task that mean less here, in the order of the file."""
    found = [*find_effects(task, _EFFECTS), *_buckets(task)]
    return sorted(found, key=lambda effect: effect.line)


def _buckets(task: Task) -> Iterator[Effect]:
    for mount in task.file_mounts:
        if (mount.spec.get("config") or {}).get("mount_cached"):
            key = f"file_mounts.{mount.target}.config.mount_cached"
            what = "settings of rclone; files go through a write-back directory here"
            yield Effect(key, task.lines.get(key, mount.line), what)
        if mount.source is None and mount.bucket:
            what = f"a folder of this machine stands for the bucket {mount.bucket!r}"
            yield Effect(f"file_mounts.{mount.target}", mount.line, what)
