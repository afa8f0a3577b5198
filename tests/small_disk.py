"""Small file system of its own for a test, which fills up or becomes read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system in `folder/disk` for the block. Only root can, so the test is skipped for others.

    Args:
        folder: folder of the test.
        size: size as `mount` takes it, such as "600k".
    """
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    if os.getuid() != 0 or subprocess.call(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]):
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.call(["umount", "-l", str(disk)])  # a test may have done so


def fill_up(ballast: Path) -> None:
    """Leave no space on the disk of a file, which takes it all."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
