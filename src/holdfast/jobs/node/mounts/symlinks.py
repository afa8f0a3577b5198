"""Symbolic links of a job: created, removed, and used by one job at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.errors import Conflict, InvalidInput
from holdfast.jobs.folder import JobFolder, job_folder
from holdfast.jobs.node.mounts.mount_spec import Link, read_links
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.status import JobStatus


def create_links(
    links: Iterable[Link], *, is_in_use: Callable[[str], bool], is_of_job: Callable[[Path], bool]
) -> None:
    """Create links of a job that do not exist yet.

    Args:
        links: its links; see `visible_links`.
        is_in_use: returns True if another running job needs the link at a path.
        is_of_job: returns True if a path is of a job. Unused links to such paths may be replaced.
    """
    for link in links:
        target = Path(link.target)
        if target.is_symlink() and str(target.readlink()) == link.source:
            continue
        if target.is_symlink() and is_of_job(target.readlink()) and not is_in_use(link.target):
            target.unlink()
        if target.exists() or target.is_symlink():
            raise Conflict(
                f"file_mounts.{link.key}: {target} already exists and does not belong to this job, so it "
                "was not changed. Choose another path for the mount, or move the existing file away."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link.source)
        except OSError as error:
            raise InvalidInput(
                f"file_mounts.{link.key}: cannot create {target} on this machine: {error}. Choose a path "
                "that you can write to: below ~, or relative to the workdir."
            ) from error


def remove_links(folder: JobFolder) -> None:
    """Remove links to files in the job's own folder. Other links stay."""
    remove_exact_links(
        link for link in visible_links(folder) if Path(link.source).is_relative_to(folder.path)
    )


def remove_exact_links(links: Iterable[Link]) -> None:
    """Remove links that still lead to their sources."""
    for link in links:
        target = Path(link.target)
        if target.is_symlink():
            with contextlib.suppress(OSError):
                if str(target.readlink()) == link.source:
                    target.unlink()


def is_link_used(records: Records, folder: JobFolder, target: str) -> bool:
    """Return True if another job that has not ended needs its link at a path."""
    return link_user(records, folder, target) is not None


def link_user(records: Records, folder: JobFolder, target: str) -> int | None:
    """Return the number of another running job with a link at a path, or None."""
    state = folder.path.parents[1]
    others = [one.id for one in records.all() if _may_have_links(one)]
    places = {one: job_folder(state, one) for one in others}
    return next(
        (
            number
            for number, place in places.items()
            if place.path != folder.path and any(link.target == target for link in visible_links(place))
        ),
        None,
    )


def visible_links(folder: JobFolder) -> list[Link]:
    """Return the links of a job that all programs see."""
    return [link for link in read_links(folder) if not (link.is_private or link.is_inside)]


def _may_have_links(record: JobRecord) -> bool:
    """Return False for a job that has ended, or waits for another one."""
    status = record.job_state.status
    is_waiting = record.spec.after is not None and status is JobStatus.PENDING
    return not status.is_final and not is_waiting
