"""`holdfast drain`: waiting, status and exit status."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.jobs.writeback import Mount, mount
from holdfast.jobs.writeback.status import has_uploader

if TYPE_CHECKING:
    from cli.conftest import Command


@pytest.fixture
def mounted(tmp_path: Path):
    with mount(tmp_path / "work", tmp_path / "bucket", timeout_s=600) as found:
        yield found
    found.close(timeout_s=600)


def test_it_waits_until_all_files_are_in_the_bucket(holdfast: Command, mounted: Mount, tmp_path: Path):
    (mounted.directory / "file").write_text("x")
    result = holdfast("drain", str(mounted.directory))
    assert result.status == 0
    assert result.out == f"all of {mounted.directory} is in {tmp_path / 'bucket'} (1 file)\n"
    assert (tmp_path / "bucket" / "file").read_text() == "x"
    assert holdfast("drain", str(mounted.directory), "--wait", "--timeout", "60s").status == 0


def test_remaining_files_are_listed(holdfast: Command, mounted: Mount):
    with (mounted.directory / "open").open("w"):
        holdfast("drain", str(mounted.directory), "--timeout", "100ms").printed(
            "being written", "1 open for writing", status=1
        )
        facts = holdfast("drain", str(mounted.directory), "--status", "--json").json
        assert facts["is_drained"] is False
        assert [one["name"] for one in facts["written"]] == ["open"]


def test_a_dead_uploader_is_reported(holdfast: Command, mounted: Mount):
    pid = mounted.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while has_uploader(mounted.directory):
        pass
    (mounted.directory / "file").write_text("x")
    holdfast("drain", mounted.directory).printed("just changed", status=1).refused(
        "the uploader is dead", status=1
    )


@pytest.mark.parametrize("is_file", [False, True])
def test_any_other_directory_or_file_is_an_error(holdfast: Command, tmp_path: Path, is_file: bool):
    (tmp_path / "file").write_bytes(b"")
    place = tmp_path / "file" if is_file else tmp_path
    holdfast("drain", place).refused("is not a write-back directory")
