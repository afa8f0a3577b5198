"""Fixtures of the write-back tests: a directory with a bucket on the disk, or behind a proxy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.testing.faultproxy import FaultProxy
from holdfast.testing.servers import Server, ministack
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


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server; its keys are in the environment, for uploaders too."""
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    with ministack() as server, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.env.items():
            patch.setenv(name, value)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        patch.setenv("AWS_CONFIG_FILE", "/nowhere")
        yield server


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    """A proxy before the S3 server."""
    with FaultProxy("127.0.0.1", s3.port) as proxy:
        yield proxy


@pytest.fixture
def remote(s3: Server, proxy: FaultProxy, desks: Callable[..., Desk]) -> Desk:
    """A directory whose uploader gets to its bucket by the proxy only, while the test looks past it."""
    number = next(_numbers)
    made = desks(
        "checkpoints", s3.home(f"t{number}", port=proxy.port, timeout="2", part_bytes="5MiB", parallel="1")
    )
    from holdfast.store import open_store

    made.store = open_store(s3.home(f"t{number}"))
    made.mount()
    return made
