"""Links from where a job wants its mounts to where they are, put in place and taken away again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.documents import decode, read_as
from holdfast.errors import Conflict, InvalidInput
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.plan import write_whole


@dataclass(frozen=True, slots=True)
class Link:
    """A path of the job that leads to a place of this machine."""

    target: str  # absolute
    source: str  # absolute
    key: str  # as it stands in the task file, for messages


def write_links(folder: JobFolder, links: list[Link]) -> None:
    """Write down what has to lead where."""
    write_whole(_document(folder), json.dumps([asdict(link) for link in links]))


def read_links(folder: JobFolder) -> list[Link]:
    """The links of a job."""
    try:
        told = decode(_document(folder).read_bytes(), "the links of a job", any_text=True)
    except FileNotFoundError:
        return []
    return list(read_as(tuple[Link, ...], told, "the links of a job"))


def attach(folder: JobFolder, *, is_in_use: Callable[[str], bool], state: Path) -> None:
    """Put all links in place; those that are there already are left alone.

    Args:
        folder: of the job.
        is_in_use: whether another living job needs the link at a path.
        state: links to places in here are ours to replace.

    Raises:
        Conflict: something else is at a target.
        InvalidInput: nothing can be made there.
    """
    for link in read_links(folder):
        target = Path(link.target)
        if target.is_symlink() and str(target.readlink()) == link.source:
            continue
        if target.is_symlink() and target.readlink().is_relative_to(state) and not is_in_use(link.target):
            target.unlink()
        if target.exists() or target.is_symlink():
            raise Conflict(
                f"file_mounts.{link.key}: {target} is there already and does not belong to this job, so it "
                "was left alone. Choose another path for the mount, or move away what is there."
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link.source)
        except OSError as error:
            raise InvalidInput(
                f"file_mounts.{link.key}: {target} could not be made on this machine: {error}. Choose a path "
                "that you may write to: below ~, or relative to the workdir."
            ) from error


def detach(folder: JobFolder) -> None:
    """Take away links to what the job alone had; others lead to what stays, and stay too."""
    for link in read_links(folder):
        target = Path(link.target)
        if Path(link.source).is_relative_to(folder.path) and target.is_symlink():
            with contextlib.suppress(OSError):
                if str(target.readlink()) == link.source:
                    target.unlink()


def _document(folder: JobFolder) -> Path:
    return folder.path / "mounts.json"
