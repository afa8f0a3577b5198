"""Mounts and links of a job, relocated to its scratch folder."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.mount_spec import (
    Link,
    MountSpec,
    read_links,
    read_mount_specs,
    write_links,
    write_mount_specs,
)
from holdfast.jobs.node.mounts.scratch import scratch_folder
from holdfast.jobs.node.mounts.symlinks import visible_links


def write_scratch_mounts(job: JobFolder, scratch: JobFolder, *, is_shared: bool) -> None:
    """Write a job's mounts and links into its scratch folder, for mounter and shells.

    Args:
        is_shared: True if other machines mount the same places.
    """
    specs = [
        dataclasses.replace(spec, path=str(_moved(spec, scratch)), is_shared=is_shared)
        for spec in read_mount_specs(job)
    ]
    moved = {link.target: link for link in moved_links(job, scratch)}
    write_mount_specs(scratch, specs)
    write_links(scratch, [moved.get(link.target, link) for link in read_links(job)])


def moved_links(job: JobFolder, scratch: JobFolder) -> list[Link]:
    """Return the links of a job to files in its scratch folder."""
    sources = {spec.path: str(_moved(spec, scratch)) for spec in read_mount_specs(job)}
    return [
        dataclasses.replace(link, source=sources[link.source])
        for link in read_links(job)
        if link.source in sources
    ]


def fixed_links(job: JobFolder) -> list[Link]:
    """Return the visible links of a job to files outside of scratch folders."""
    sources = {spec.path for spec in read_mount_specs(job)}
    return [link for link in visible_links(job) if link.source not in sources]


def shared_links(job: JobFolder) -> list[Link]:
    """Return the visible links of a job to scratch folders, except those in workdirs.

    All nodes see them.
    """
    sources = {spec.path for spec in read_mount_specs(job)}
    nodes = job.path / "nodes"
    return [
        link
        for link in visible_links(job)
        if link.source in sources and not Path(link.target).is_relative_to(nodes)
    ]


def remove_shared_links(job: JobFolder, task_id: str) -> None:
    """Remove the links of `shared_links`, if they lead to a scratch folder of this job."""
    own = scratch_folder(Path("/"), job, task_id).path.name
    for link in shared_links(job):
        target = Path(link.target)
        with contextlib.suppress(OSError):
            if own in target.readlink().parts:
                target.unlink()


def _moved(spec: MountSpec, scratch: JobFolder) -> Path:
    return scratch.copies / Path(spec.path).name
