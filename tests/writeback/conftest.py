"""Fixtures of the write-back tests: directories with a bucket on the disk, or behind a proxy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fault_proxy import FaultProxy
from servers import Server
from writeback.harness import MountedDirectory

_numbers = itertools.count()


@pytest.fixture
def make_directory(tmp_path: Path) -> Iterator[Callable[..., MountedDirectory]]:
    """Return a factory of directories with the same bucket, which is a folder."""
    made: list[MountedDirectory] = []

    def make(name: str = "checkpoints", place: str | None = None) -> MountedDirectory:
        made.append(MountedDirectory(tmp_path / name, place or str(tmp_path / "bucket")))
        return made[-1]

    yield make
    for mounted in made:
        mounted.close()


@pytest.fixture
def mounted(make_directory: Callable[..., MountedDirectory]) -> MountedDirectory:
    """Return a mounted directory."""
    made = make_directory()
    made.mount()
    return made


@pytest.fixture
def remote(
    s3: Server, proxy: FaultProxy, make_directory: Callable[..., MountedDirectory]
) -> MountedDirectory:
    """Return a directory whose uploader uses a proxy, while the test accesses the bucket directly."""
    number = next(_numbers)
    made = make_directory(
        "checkpoints",
        s3.home(f"writeback{number}", port=proxy.port, timeout="2", part_bytes="5MiB", parallel="1"),
    )
    from holdfast.checkpoint.store import open_store

    made.store = open_store(s3.home(f"writeback{number}"))
    made.mount()
    return made
