"""The local directory: what is whole, what is left out, and where files may be put."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled.directory import Directory


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_files_in_progress_and_other_files_are_left_out(tmp_path: Path):
    others = ("ab/kernel.so", "ab/kernel.cpp", "cd/12.tmp", "cd/.hidden", "precompiled_headers/h.gch")
    whole = {"ab/other.so": b"22", "fxgraph/ab/key/value": b"333"}
    fill(tmp_path, {**dict.fromkeys(others, b"1"), "locks/x.lock": b"", "cd/x.lock": b"", **whole})
    (tmp_path / "ab" / "kernel_CxxBuild").mkdir()
    (tmp_path / "ab" / "kernel_CxxBuild" / "part.o").write_bytes(b"1")
    (tmp_path / "ab" / "link.so").symlink_to("other.so")
    (tmp_path / "linked").symlink_to(tmp_path / "ab")
    os.mkfifo(tmp_path / "pipe")
    found = directories.whole_files(Directory(tmp_path))
    assert found == {name: len(data) for name, data in whole.items()}


def test_of_a_shared_directory_only_new_files_count(tmp_path: Path):
    fill(tmp_path, {"old": b"1", "new": b"1"})
    os.utime(tmp_path / "old", (1000, 1000))
    os.utime(tmp_path / "new", (3000, 3000))
    assert list(directories.whole_files(Directory(tmp_path, since_unix_s=2000))) == ["new"]
    assert set(directories.whole_files(Directory(tmp_path))) == {"old", "new"}
    assert directories.whole_files(Directory(tmp_path / "none")) == {}


def elf(*, at: int, entries: int, size: int) -> bytes:
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 40, at)
    struct.pack_into("<HH", head, 58, 64, entries)
    return bytes(head).ljust(size, b"\1")


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (elf(at=100, entries=2, size=228), True),
        (elf(at=100, entries=2, size=227), False),
        (elf(at=0, entries=0, size=500), False),
        (elf(at=100, entries=2, size=228)[:40], False),
        (b"no binary", True),
        (b"", True),
    ],
)
def test_a_binary_of_a_killed_linker_is_skipped(tmp_path: Path, data: bytes, is_whole: bool):
    (tmp_path / "file.so").write_bytes(data)
    found = directories.read_whole(Directory(tmp_path), "file.so")
    assert found == (data if is_whole else None)


def test_a_real_binary_is_complete_and_any_part_of_it_is_not(tmp_path: Path):
    import _ctypes

    whole = Path(_ctypes.__file__).read_bytes()
    (tmp_path / "file.so").write_bytes(whole)
    assert directories.read_whole(Directory(tmp_path), "file.so") == whole
    (tmp_path / "file.so").write_bytes(whole[:-1])
    assert directories.read_whole(Directory(tmp_path), "file.so") is None


def test_missing_files_and_links_are_not_read(tmp_path: Path):
    (tmp_path / "there").write_bytes(b"1")
    (tmp_path / "link").symlink_to("there")
    assert directories.read_whole(Directory(tmp_path), "gone") is None
    assert directories.read_whole(Directory(tmp_path), "link") is None


def test_files_are_written_atomically_and_only_inside(tmp_path: Path):
    directory, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    there = Directory(directory)
    directories.place(there, "ab/file", b"1")
    directories.place(there, "ab/file", b"22")
    assert (directory / "ab" / "file").read_bytes() == b"22"
    assert directories.has(there, "ab/file", 2)
    assert not directories.has(there, "ab/file", 1)
    assert not directories.has(there, "ab", 2)
    (directory / "way").symlink_to(outside)
    for path in ("way/file", "../outside/file", str(outside / "file")):
        with pytest.raises(InvalidInput):
            directories.place(there, path, b"1")
    assert list(outside.iterdir()) == []
    assert [path.name for path in (directory / "ab").iterdir()] == ["file"]


def test_a_link_in_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path):
    (tmp_path / "outside").write_bytes(b"old")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "file").symlink_to(tmp_path / "outside")
    directories.place(Directory(tmp_path / "cache"), "file", b"new")
    assert (tmp_path / "outside").read_bytes() == b"old"
    assert not (tmp_path / "cache" / "file").is_symlink()


def test_own_directories_are_private_and_one_for_each_home_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = directories.own("s3://bucket/run", "k1")
    assert first == directories.own("s3://bucket/run", "k1")
    assert len({first, directories.own("s3://bucket/run", "k2"), directories.own("runs", "k1")}) == 3
    assert first.parent.stat().st_mode & 0o777 == 0o700
    assert directories.is_own(first)
    first.parent.chmod(0o777)
    other = directories.own("s3://bucket/run", "k1")
    assert other.parent != first.parent
    assert other.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_is_chosen_if_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert directories.current() is None
    assert not directories.is_chosen()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = directories.current()
    assert found is not None
    assert (found.path, found.since_unix_s) == (tmp_path, 0)
    assert directories.is_chosen()


def test_the_directory_that_torch_chooses_is_shared_with_other_programs(monkeypatch: pytest.MonkeyPatch):
    import time

    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]  # this sets it
    assert not directories.is_chosen()
    found = directories.current()
    assert found is not None
    assert time.time() - 86400 < found.since_unix_s <= time.time()
