"""Fixtures of the write-back tests: a directory with a bucket on the disk, or behind a proxy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.testing.faultproxy import FaultProxy
from holdfast.testing.servers import Server
from writeback.desk import Desk

_numbers = itertools.count()


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    """Makes directories whose files go to one bucket, which is a folder."""
    made: list[Desk] = []

    def make(name: str = "checkpoints", place: str | None = None) -> Desk:
        made.append(Desk(tmp_path / name, place or str(tmp_path / "bucket")))
        return made[-1]

    yield make
    for desk in made:
        desk.close()


@pytest.fixture
def desk(desks: Callable[..., Desk]) -> Desk:
    """A directory that is mounted."""
    made = desks()
    made.mount()
    return made


@pytest.fixture
def remote(s3: Server, proxy: FaultProxy, desks: Callable[..., Desk]) -> Desk:
    """A directory whose uploader gets to its bucket by the proxy only, while the test looks past it."""
    number = next(_numbers)
    made = desks(
        "checkpoints",
        s3.home(f"writeback{number}", port=proxy.port, timeout="2", part_bytes="5MiB", parallel="1"),
    )
    from holdfast.store import open_store

    made.store = open_store(s3.home(f"writeback{number}"))
    made.mount()
    return made
