"""Removal of directories that are uploaded, and limits for the download into one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.jobs.writeback import remove_uploaded
from writeback.harness import MountedDirectory

MakeDirectory = Callable[..., MountedDirectory]


def ended(mounted: MountedDirectory) -> None:
    """Have the uploader exit, and wait for that."""
    for held in mounted.held:
        held.close()
    mounted.held.clear()
    mounted.wait_until_gone()


def test_a_directory_that_is_uploaded_is_removed_and_its_bucket_is_not(make_directory: MakeDirectory) -> None:
    mounted = make_directory()
    mounted.mount()
    files = {"data": b"1" * 5_000_000, "deep/marker": b"data", "empty": b""}
    for name, data in files.items():
        mounted.write(name, data)
    mounted.drained()
    ended(mounted)
    assert remove_uploaded(mounted.directory)
    assert list(mounted.directory.parent.iterdir()) == [Path(mounted.place)]
    assert mounted.bucket() == files
    assert remove_uploaded(mounted.directory), "a second time"
    mounted.mount()
    assert mounted.local() == files
    assert mounted.drained() == files, "a later mount finds everything, and deletes nothing"


def test_a_directory_with_an_uploader_stays(mounted: MountedDirectory) -> None:
    mounted.write("data", b"1")
    mounted.drained()
    assert not remove_uploaded(mounted.directory)
    assert mounted.local() == {"data": b"1"}


def lose_journal(mounted: MountedDirectory) -> None:
    for path in (mounted.directory / ".holdfast-writeback").glob("*journal*"):
        path.unlink()


CHANGES: dict[str, Callable[[MountedDirectory], object]] = {
    "change": lambda mounted: mounted.write("data", b"after the uploader"),
    "add": lambda mounted: mounted.write("more", b"after the uploader"),
    "delete": lambda mounted: (mounted.directory / "data").unlink(),
    "link": lambda mounted: (mounted.directory / "link").symlink_to("data"),
    "unfinished": lambda mounted: mounted.write("next.tmp", b"after the uploader"),
    "set aside": lambda mounted: mounted.write(".holdfast-writeback/set-aside/2026-0/old", b"older"),
    "journal": lose_journal,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_directory_with_anything_else_stays(mounted: MountedDirectory, change: str) -> None:
    mounted.write("data", b"1")
    mounted.drained()
    ended(mounted)
    CHANGES[change](mounted)
    before = mounted.local()
    assert not remove_uploaded(mounted.directory)
    assert mounted.local() == before
    assert mounted.bucket() == {"data": b"1"}


def test_a_removal_that_was_killed_is_completed(mounted: MountedDirectory) -> None:
    mounted.write("data", b"1")
    mounted.drained()
    ended(mounted)
    removed = mounted.directory.with_name(f".{mounted.directory.name}.removed")
    shutil.copytree(mounted.directory, removed, copy_function=shutil.copy, ignore=lambda *_: ["holders"])
    assert remove_uploaded(mounted.directory)
    assert not removed.exists()
    assert not mounted.directory.exists()
    assert mounted.bucket() == {"data": b"1"}


def test_a_download_above_the_limit_changes_nothing(make_directory: MakeDirectory) -> None:
    first, second = make_directory(), make_directory("second")
    first.mount()
    files = {"one": b"1" * 600, "two": b"2" * 600}
    for name, data in files.items():
        first.write(name, data)
    first.drained()
    said = r"holds 1.2 kB that are not in .*its limit of 1.0 kB. Nothing was"
    with pytest.raises(InvalidInput, match=said):
        second.mount(fetch_bytes=1000)
    assert second.local() == {}
    second.mount(fetch_bytes=1200)
    assert second.local() == files
    assert second.drained() == files
    third = make_directory("third")
    third.mount(fetch=False, fetch_bytes=1)
    assert third.local() == {}
