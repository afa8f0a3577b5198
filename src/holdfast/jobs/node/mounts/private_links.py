"""Private links of a job: at paths such as /checkpoints, seen by the job's processes only.

Every job can have its own, and none needs permission to write to /. They are in a mount namespace, which each
shell of the job enters before its commands begin.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.job_links import read_links
from holdfast.system.linux.mount_namespace import add_links, enter

ROOT = Path("/")


def enter_private_links(folder: JobFolder) -> None:
    """Move this process, of one thread, to where its job's private links are.

    Does nothing if the job has none.

    Raises:
        OSError: the kernel forbids that, or a directory cannot be covered.
    """
    groups: dict[Path, dict[str, str]] = defaultdict(dict)
    for link in read_links(folder):
        if link.is_private:
            parent = existing_parent(Path(link.target))
            groups[parent][str(Path(link.target).relative_to(parent))] = link.source
    if not groups:
        return
    folder.staging.mkdir(exist_ok=True)
    enter()
    # The deepest first: a directory that was covered is among the entries of those above it.
    for parent in sorted(groups, key=lambda one: len(one.parts), reverse=True):
        add_links(parent, groups[parent], folder.staging)


def existing_parent(target: Path) -> Path:
    """Return the nearest directory above a path that exists."""
    return next((parent for parent in target.parents if parent.is_dir()), ROOT)
