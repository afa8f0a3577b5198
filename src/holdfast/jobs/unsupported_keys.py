"""Task-file keys that an engine ignores or interprets differently, from the engine's own table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from holdfast.jobs.engine import UnsupportedKey
from holdfast.jobs.node.mounts.links import private_mounts, private_note
from holdfast.jobs.task.model import Task

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
CHOICE_KEYS = tuple(
    f"resources.{name}"
    for name in (
        "cloud",
        "region",
        "zone",
        "instance_type",
        "local_disk",
        "accelerator_args",
        "any_of",
        "ordered",
    )
)
"""Keys that choose a machine."""
IMAGE = "resources.image_id"


_BASHRC = re.compile(r">\s*[\"']?(?:~|\$HOME|\$\{HOME\})/\.(?:bashrc|bash_profile|profile)\b")
_UV_PIP = re.compile(r"\buv\s+pip\s+(?:install|sync)\b")


def find_unsupported_keys(task: Task, table: Mapping[str, str]) -> list[UnsupportedKey]:
    """Return the keys of a table that a task sets.

    Args:
        table: what the engine does with a key, by its path, such as resources.use_spot.
    """
    return [
        UnsupportedKey(key, task.lines[key], what)
        for key, what in table.items()
        if key in task.lines and value_at(task.document, key) is not None
    ]


def find_on_machines(
    task: Task, table: Mapping[str, str], further: Iterable[UnsupportedKey] = (), *, bucket: str
) -> list[UnsupportedKey]:
    """Return the keys that an engine which runs the commands itself ignores or changes, in file order.

    Args:
        table: see `find_unsupported_keys`.
        further: keys of this engine only.
        bucket: what replaces a bucket without a URL.
    """
    found = [one for one in find_unsupported_keys(task, table) if task.image is None or one.key != IMAGE]
    found += [*further, *_mounts_in_place(task), *_cache_settings(task), *_shell_differences(task)]
    found += [
        UnsupportedKey(f"file_mounts.{one.target}", one.line, f"{bucket} replaces the bucket {one.bucket!r}")
        for one in task.file_mounts
        if one.source is None and one.bucket
    ]
    found += [
        UnsupportedKey(f"file_mounts.{one.target}", one.line, private_note()) for one in private_mounts(task)
    ]
    return sorted(found, key=lambda found_key: found_key.line)


def _mounts_in_place(task: Task) -> list[UnsupportedKey]:
    """Return the mounts whose files are at their path already. They are neither copied nor linked."""
    what = "this file itself: it is there already, so that changes of the job remain"
    return [
        UnsupportedKey(f"file_mounts.{mount.target}", mount.line, what)
        for mount in task.file_mounts
        if mount.is_in_place
    ]


def _cache_settings(task: Task) -> list[UnsupportedKey]:
    """Return the settings of rclone's cache. Only the limit is used."""
    keys = {mount.target: f"file_mounts.{mount.target}.config.mount_cached" for mount in task.file_mounts}
    what = "settings of rclone, except vfs_cache_max_size; a write-back directory replaces it"
    return [
        UnsupportedKey(keys[mount.target], task.lines.get(keys[mount.target], mount.line), what)
        for mount in task.file_mounts
        if (mount.spec.get("config") or {}).get("mount_cached")
    ]


def _shell_differences(task: Task) -> list[UnsupportedKey]:
    """Return the differences of the shell that commands of `setup` and `run` depend on."""
    return [
        UnsupportedKey(key, task.lines.get(key, 1), what)
        for key, text in (("setup", task.setup), ("run", task.run))
        for what in _differences(text, is_in_image=task.image is not None)
    ]


def _differences(text: str, *, is_in_image: bool) -> Iterator[str]:
    if _BASHRC.search(text):
        yield "~/.bashrc is not read by commands, and keeps what is written; set variables in envs or run"
    if not is_in_image and _UV_PIP.search(text):
        yield "`uv pip` sees only the job's own packages, and may install others again; pip sees all"


def value_at(document: Mapping[str, Any], key: str) -> Any:
    """Return the value at a path of keys, or None."""
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
