"""Detection of stores that overlap: the same place, or one inside the other, under any names."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import InvalidInput
from holdfast.system.linux.mounts import mount_points

Identity: TypeAlias = "tuple[object, tuple[str, ...]]"
"""The device and inode of an existing directory, and the names below it that do not exist yet."""


def check_disjoint(home: Store, local: Store) -> None:
    """Raise if the local tier and home overlap: each would delete objects of the other."""
    overlap = False
    if isinstance(home, LocalStore) and isinstance(local, LocalStore):
        mine, theirs = (Path(os.path.realpath(one.root)) for one in (home, local))
        overlap = _is_inside(mine, theirs) or _is_inside(theirs, mine)
    elif isinstance(home, ObjectStore) and isinstance(local, ObjectStore):
        overlap = home.address.overlaps(local.address)
    if overlap:
        raise InvalidInput(
            f"local={local.url} and the home {home.url} are the same place, or one is inside the other. Home "
            "would keep only the few checkpoints that the local tier keeps. Nothing was written. Set local= "
            "to a separate folder on this host's fast disk, or leave it out."
        )


def _is_inside(inner: Path, outer: Path) -> bool:
    """Return True if a path without links is `outer` or below it. Bind mounts are detected."""
    target = _identity_of(outer)
    if any(_identity_of(level) == target for level in (inner, *inner.parents)):
        return True
    (device, names), (its_device, its_names) = _path_on_device(inner), _path_on_device(outer)
    return device == its_device and names[: len(its_names)] == its_names


def _identity_of(path: Path) -> Identity:
    for level in (path, *path.parents):
        with suppress(OSError):
            facts = level.stat()
            return (facts.st_dev, facts.st_ino), path.relative_to(level).parts
    return None, path.parts


def _path_on_device(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the file system of a path and the path within it. All bind mounts share these."""
    found: tuple[int, str, Path] = (0, "", path)
    with suppress(OSError, ValueError):
        for mount in mount_points():
            if path.is_relative_to(mount.path) and len(mount.path.parts) >= found[0]:
                found = len(mount.path.parts), mount.device, mount.root / path.relative_to(mount.path)
    return found[1], found[2].parts
