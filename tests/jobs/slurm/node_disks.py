"""Files and processes of mounts on the disks of nodes, for tests."""

from __future__ import annotations

from pathlib import Path

from holdfast.jobs.node import processes
from holdfast.jobs.writeback import status_of
from jobs.harness import command_line
from jobs.slurm.harness import SlurmHarness


def cache_on(slurm: SlurmHarness, node: str) -> Path:
    """Return the write-back directory of the only job on a node."""
    (found,) = (slurm.folder / "disks" / node).glob("*/mounts/0")
    return found


def uploaders(slurm: SlurmHarness, node: str) -> list[processes.Process]:
    """Return the running uploader on a node, if any."""
    pid = status_of(cache_on(slurm, node)).pid
    found = processes.find(pid) if pid else None
    return [found] if found else []


def scratch_roles(slurm: SlurmHarness, role: str) -> list[processes.Process]:
    """Return the processes of mounts with this role on all nodes."""
    disks = str(slurm.folder / "disks").encode()
    found = []
    for one in processes.snapshot().values():
        words = command_line(one.pid)
        if role.encode() in words and any(word.startswith(disks) for word in words):
            found.append(one)
    return found


def left_on(slurm: SlurmHarness, node: str = "n1") -> list[str]:
    """Return the files of jobs on the disk of a node."""
    root = slurm.folder / "disks" / node
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
