"""Task-file keys that an engine ignores or interprets differently, from the engine's own table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast.jobs.node.mounts.mount_records import private_mounts, private_note
from holdfast.jobs.task.model import Task, value_at

_NO_VOLUMES = "no volumes are created; kept for other engines"
_NO_DISK = "no disk is created; kept for other engines"
UNUSED_KEYS: Mapping[str, str] = {
    "event_callback": "not called",
    "managed_secrets": "not fetched",
    "inputs": "not used",
    "outputs": "not used",
    "volumes": _NO_VOLUMES,
    "volume_mounts": _NO_VOLUMES,
    "api_server_access": "there is no API server",
    "resources.disk_size": _NO_DISK,
    "resources.disk_tier": _NO_DISK,
    "resources.max_hourly_cost": "nothing is bought",
    "resources.ports": "ports are neither opened nor closed",
    "resources.volumes": _NO_VOLUMES,
}
"""Keys that have no use without a cloud, and why."""
_CHOICES = ("cloud", "region", "zone", "instance_type", "local_disk", "accelerator_args", "any_of", "ordered")
CHOICE_KEYS = tuple(f"resources.{name}" for name in _CHOICES)  # keys that choose a machine
IMAGE = "resources.image_id"
_IN_PLACE = "this file itself: it is there already, so that changes of the job remain"
_CACHED = "settings of rclone, except vfs_cache_max_size; a write-back directory replaces it"
_NO_BASHRC = "~/.bashrc is not read by commands, and keeps what is written; set variables in envs or run"
_OWN_PACKAGES = "`uv pip` sees only the job's own packages, and may install others again; pip sees all"
_BASHRC = re.compile(r">\s*[\"']?(?:~|\$HOME|\$\{HOME\})/\.(?:bashrc|bash_profile|profile)\b")
_UV_PIP = re.compile(r"\buv\s+pip\s+(?:install|sync)\b")


def find_unsupported(task: Task, table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a task with their effects in a table, by a path such as resources.use_spot."""
    for key, what in table.items():
        is_used = key == IMAGE and task.image is not None
        if key in task.lines and not is_used and value_at(task.document, key) is not None:
            yield key, what


def find_on_machines(task: Task, table: Mapping[str, str], *, bucket: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that an engine which runs the commands itself ignores or changes, and how."""
    yield from find_unsupported(task, table)
    for key, text in (("setup", task.setup), ("run", task.run)):
        if _BASHRC.search(text):
            yield key, _NO_BASHRC
        if task.image is None and _UV_PIP.search(text):
            yield key, _OWN_PACKAGES
    private = list(private_mounts(task))
    for mount in task.file_mounts:
        if mount.is_in_place:
            yield mount.key, _IN_PLACE
        if value_at(mount.spec, "config.mount_cached"):
            yield f"{mount.key}.config.mount_cached", _CACHED
        if mount.source is None and mount.bucket:
            yield mount.key, f"{bucket} replaces the bucket {mount.bucket!r}"
        if mount in private:
            yield mount.key, private_note()
