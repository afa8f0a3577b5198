"""`holdfast drain`: waits, tells, and its exit status can be trusted."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.writeback import Mount, mount

if TYPE_CHECKING:
    from cli.conftest import Command


@pytest.fixture
def held(tmp_path: Path):
    with mount(tmp_path / "work", tmp_path / "bucket", timeout_s=60) as found:
        yield found
    found.close(timeout_s=60)


def test_it_waits_until_all_is_there(holdfast: Command, held: Mount, tmp_path: Path):
    (held.directory / "file").write_text("x")
    said = holdfast("drain", str(held.directory))
    assert said.status == 0
    assert said.out == f"all of {held.directory} is in {tmp_path / 'bucket'} (1 file)\n"
    assert (tmp_path / "bucket" / "file").read_text() == "x"
    assert holdfast("drain", str(held.directory), "--wait", "--timeout", "60s").status == 0


def test_what_is_left_is_listed(holdfast: Command, held: Mount):
    with (held.directory / "open").open("w"):
        said = holdfast("drain", str(held.directory), "--timeout", "100ms")
        assert said.status == 1
        assert "being written" in said.out
        assert "1 open for writing" in said.out
        facts = holdfast("drain", str(held.directory), "--status", "--json").json
        assert facts["is_drained"] is False
        assert [one["name"] for one in facts["written"]] == ["open"]


def test_a_dead_uploader_is_told(holdfast: Command, held: Mount):
    import os

    from holdfast.writeback.status import has_uploader

    pid = held.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while has_uploader(held.directory):
        pass
    (held.directory / "file").write_text("x")
    said = holdfast("drain", str(held.directory))
    assert said.status == 1
    assert "just changed" in said.out
    assert "the uploader is dead" in said.err


def test_any_other_directory_is_an_error(holdfast: Command, tmp_path: Path):
    said = holdfast("drain", str(tmp_path))
    assert said.status == 2
    assert "is not a write-back directory" in said.err


def test_a_file_in_place_of_the_directory_is_an_error(holdfast: Command, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    said = holdfast("drain", str(tmp_path / "file"))
    assert said.status == 2
    assert "is not a write-back directory" in said.err
