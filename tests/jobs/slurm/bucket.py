"""Bucket of a test, and the files and processes of mounts on the disks of nodes."""

from __future__ import annotations

import itertools
from pathlib import Path

from holdfast.jobs.node import processes
from holdfast.store import Store, open_store
from holdfast.testing.fault_proxy import FaultProxy
from holdfast.writeback import status_of
from holdfast.writeback.ownership import FOLDER
from jobs.slurm.harness import SlurmHarness
from servers import Server

_numbers = itertools.count()
SAVES = """
save() {
  head -c 9000000 /dev/urandom > out/data-$1.tmp
  mv out/data-$1.tmp out/data-$1
  echo $1 > out/marker-$1
}
"""
"""Data in two parts, then the marker that refers to them."""


class Bucket:
    """Prefix of the bucket, which jobs reach through the proxy and tests directly."""

    def __init__(self, s3: Server, proxy: FaultProxy) -> None:
        prefix = f"slurm{next(_numbers)}"
        self.url = s3.home(prefix, port=proxy.port, timeout="2", part_bytes="5MiB", parallel="1")
        self.store: Store = open_store(s3.home(prefix))

    def names(self) -> set[str]:
        return {entry.name for entry in self.store.list() if not entry.name.startswith(FOLDER)}

    @property
    def cached(self) -> str:
        return f'file_mounts: {{out: {{source: "{self.url}", mode: MOUNT_CACHED}}}}'


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


def command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def left_on(slurm: SlurmHarness, node: str = "n1") -> list[str]:
    """Return the files of jobs on the disk of a node."""
    root = slurm.folder / "disks" / node
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
