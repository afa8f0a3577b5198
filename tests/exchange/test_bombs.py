"""A small source cannot make an import write, allocate or wait for much more than it holds."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import Corrupt, HoldfastError, InvalidInput
from holdfast.exchange import allowlist
from holdfast.exchange.arrival import import_checkpoint


def written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_expanded_tensor_is_written_only_if_that_is_allowed(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1).expand(1 << 20)}, source)
    with pytest.raises(InvalidInput, match="--allow-expanded") as caught:
        import_checkpoint(source, tmp_path / "home", under="model")
    assert "4194304 bytes" in str(caught.value)
    assert written_bytes(tmp_path / "home") == 0
    import_checkpoint(source, tmp_path / "home", under="model", allow_expanded=True)
    assert torch.equal(holdfast.open(tmp_path / "home")["model.w"], torch.ones(1 << 20))


def test_a_kilobyte_that_asks_for_terabytes_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1).expand(1 << 40)}, source)
    with pytest.raises(InvalidInput, match="4398046511104 bytes"):
        import_checkpoint(source, tmp_path / "home", under="model")


def test_tensors_of_a_safetensors_file_may_not_share_bytes(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}
    header = json.dumps({f"w{i}": entry for i in range(1000)}).encode()
    source = tmp_path / "a.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4000))
    with pytest.raises(Corrupt, match="share the bytes"):
        import_checkpoint(source, tmp_path / "home")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    plain, source = tmp_path / "plain.pt", tmp_path / "a.pt"
    torch.save({"w": torch.zeros(1 << 20)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert source.stat().st_size < 100_000
    with pytest.raises(Corrupt, match="is compressed"):
        import_checkpoint(source, tmp_path / "home", under="model")


@pytest.mark.parametrize("bomb", [b"\x80\x02Nr\xff\xff\xff\x3f.", b"Np1073741823\n."])
def test_a_pickle_that_numbers_an_object_far_away_is_refused(bomb: bytes) -> None:
    """Nine bytes made the unpickler allocate ten gigabytes."""
    assert pickle.loads(b"\x80\x02Nr\x01\0\0\0.") is None
    with pytest.raises(Corrupt, match="numbers an object 1073741823"):
        allowlist.load(bomb, {}, "bomb")


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_fifo_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "source")
    with pytest.raises(HoldfastError):
        import_checkpoint(tmp_path / "source", tmp_path / "home", kind=kind)


def test_a_fifo_is_no_source_of_any_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "source")
    with pytest.raises(InvalidInput, match="is nothing that can be imported"):
        import_checkpoint(tmp_path / "source", tmp_path / "home")
