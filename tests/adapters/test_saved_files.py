from __future__ import annotations

import errno
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.adapters.kit import saved_files
from holdfast.adapters.kit.saved_files import file_fault, folder_fault, read_json
from holdfast.errors import Denied, HoldfastError, RetryLater

DEEP = "[" * 100_000
NAMES = ["model.safetensors", "model.safetensors.index.json", "optimizer.pt", "x.bin", "rng.pth", "s.pkl"]


STRANGE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to(path.parent / "missing"),
    "loop": lambda path: path.symlink_to(path),
    "empty": lambda path: path.write_bytes(b""),
    "deep": lambda path: path.write_text(DEEP),
    "header": lambda path: path.write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode()),
    "offsets": lambda path: path.write_bytes(struct.pack("<Q", 22) + b'{"w":{"data_offsets":[]}}'),
    "length": lambda path: path.write_bytes(struct.pack("<Q", 2**64 - 1) + b"{}"),
    "long name": lambda path: path.write_text(json.dumps({"weight_map": {"w": "a" * 5000}})),
    "odd name": lambda path: path.write_text(json.dumps({"weight_map": {"w": "a\0b", "v": "\udcff"}})),
}


def test_whole_files_have_no_fault(tmp_path: Path) -> None:
    save_file({"w": torch.arange(100.0)}, tmp_path / "model.safetensors")
    torch.save({"state": torch.arange(100.0)}, tmp_path / "optimizer.pt")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model.safetensors"}})
    )
    assert folder_fault(tmp_path) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", STRANGE)
def test_anything_in_the_place_of_a_file_is_a_fault(tmp_path: Path, name: str, kind: str) -> None:
    STRANGE[kind](tmp_path / name)
    assert name in str(file_fault(tmp_path / name)) or "is missing" in str(file_fault(tmp_path / name))
    assert folder_fault(tmp_path) is not None


def test_an_archive_that_needs_more_reading_than_its_length_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10_000_000))
    assert "x/data.pkl" in str(file_fault(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data/0", bytes(1000))
        for number in range(100):  # all of them in the same place
            info = zipfile.ZipInfo(f"x/data/{number}")
            info.file_size, info.compress_size = 1000, 1000
            info.header_offset, info.CRC = 0, archive.filelist[0].CRC
            archive.filelist.append(info)
    assert "x/data/" in str(file_fault(path))


def test_an_encrypted_archive_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x")
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    assert "encrypted" in str(file_fault(path))


@pytest.mark.parametrize("text", [DEEP, "{", '{"a": ' + "9" * 5000 + "}", "\ud800"])
def test_json_that_cannot_be_parsed_is_as_if_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text, errors="surrogatepass")
    assert read_json(tmp_path / "state.json", dict) is None
    assert read_json(tmp_path / "other.json", dict) is None


def test_a_fifo_in_the_place_of_json_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.json")
    assert read_json(tmp_path / "state.json", dict) is None


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, RetryLater), (errno.ESTALE, RetryLater), (errno.EACCES, Denied)]
)
def test_a_file_that_cannot_be_read_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[HoldfastError]
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(saved_files, "open_regular", fail)
    for name in ("optimizer.pt", "model.safetensors", "model.safetensors.index.json"):
        with pytest.raises(kind, match=f"{name} could not be read"):
            file_fault(tmp_path / name)
    with pytest.raises(kind, match="may be intact"):
        read_json(tmp_path / "state.json", dict)
