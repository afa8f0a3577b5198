"""Detection of truncated files by their own format."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from holdfast.jobs.writeback.sender import truncation_reason


def reason_for(path: Path, data: bytes) -> str:
    """Return the truncation reason of a file with these bytes."""
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return truncation_reason(fd, path.name)
    finally:
        os.close(fd)


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    """Return the bytes that a function writes."""
    room = io.BytesIO()
    write(room)
    return room.getvalue()


def write_zip(room: io.BytesIO) -> None:
    with zipfile.ZipFile(room, "w") as archive:
        archive.writestr("a", b"x" * 1000)
        archive.comment = b"said PK\x05\x06 in its comment" * 100


WHOLE = {
    "model.pt": written(lambda room: torch.save({"weight": torch.arange(1000.0), "step": 7}, room)),
    "model.safetensors": save({"weight": np.arange(1000.0)}),
    "arrays.npz": written(lambda room: np.savez(room, weight=np.arange(1000.0))),
    "commented.zip": written(write_zip),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_complete_file_has_no_truncation(tmp_path: Path, name: str):
    assert reason_for(tmp_path / name, WHOLE[name]) == ""


@pytest.mark.parametrize("name", WHOLE)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_truncated_anywhere_is_detected(
    tmp_path_factory: pytest.TempPathFactory, name: str, share: float
):
    folder = tmp_path_factory.mktemp("cut", numbered=True)
    length = int(share * len(WHOLE[name]))
    if 0 < length < 4 and not name.endswith(".safetensors"):
        return  # too short for any format to be recognized
    assert reason_for(folder / name, WHOLE[name][:length])


UNKNOWN = [("notes.txt", data) for data in (b"", b"x", b"PK", b"\x00" * 5000, b"plain text\n" * 1000)]


@pytest.mark.parametrize(("name", "data"), [*UNKNOWN, ("odd.safetensors", b"\xff" * 5000)])
def test_a_file_of_unknown_format_counts_as_complete_whatever_its_suffix(
    tmp_path: Path, name: str, data: bytes
):
    assert reason_for(tmp_path / name, data) == ""
