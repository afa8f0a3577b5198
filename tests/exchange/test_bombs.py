"""A small source cannot make an import write or allocate much more than its size, or block."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import holdfast
from campaigns.fuzz.bounded import run_case
from exchange.stock import torch_file
from holdfast.checkpoint.exchange import safe_unpickler
from holdfast.checkpoint.exchange.importer import import_checkpoint
from holdfast.errors import Corrupt, HoldfastError, InvalidInput


def written_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_an_expanded_tensor_is_imported_only_if_allowed(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1).expand(1 << 20)}, source)
    with pytest.raises(InvalidInput, match="--allow-expanded") as caught:
        import_checkpoint(source, tmp_path / "home", under="model")
    assert "4194304 bytes" in str(caught.value)
    assert written_bytes(tmp_path / "home") == 0
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "b.pt")
    with pytest.raises(InvalidInput, match="4398046511104 bytes"):
        import_checkpoint(tmp_path / "b.pt", tmp_path / "home", under="model")
    import_checkpoint(source, tmp_path / "home", under="model", allow_expanded=True)
    assert torch.equal(holdfast.open(tmp_path / "home")["model.w"], torch.ones(1 << 20))


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
def test_a_pickle_with_a_huge_memo_index_is_refused(bomb: bytes) -> None:
    """Nine bytes could make the unpickler allocate ten gigabytes."""
    assert pickle.loads(b"\x80\x02Nr\x01\0\0\0.") is None
    with pytest.raises(Corrupt, match="stores an object as number 1073741823"):
        safe_unpickler.load(bomb, {}, "bomb")


@pytest.mark.parametrize(
    ("kind", "match"),
    [("torch", "not a regular file"), ("safetensors", "not a regular file"), ("auto", "cannot be imported")],
)
def test_a_fifo_is_refused_without_blocking(tmp_path: Path, kind: str, match: str) -> None:
    os.mkfifo(tmp_path / "source")
    with pytest.raises(HoldfastError, match=match):
        import_checkpoint(tmp_path / "source", tmp_path / "home", kind=kind)


def _doubled(kind: str, levels: int) -> object:
    value: object = (1, 2)
    makes = {"dict": lambda one: {"a": one, "b": one}, "list": lambda one: [one, one]}
    for _ in range(levels):
        value = makes.get(kind, lambda one: (one, one))(value)
    return value


PICKLES = {
    "lists in each other": pickle.dumps({"a": _doubled("list", 60)}, 2),
    "dicts in each other": pickle.dumps({"a": _doubled("dict", 60)}, 2),
    "tuples in each other": pickle.dumps({"a": _doubled("tuple", 60)}, 2),
    "lists that are filled late": b"\x80\x02}X\1\0\0\0a"
    + b"".join(b"]q%c" % i for i in range(60))
    + b"0" * 59
    + b"".join(b"h%c(h%ch%ce0" % (i, i + 1, i + 1) for i in range(59))
    + b"s.",
    "tuples that are hashed and dropped": b"\x80\x02}" + b"K\1K\1\x86" + b"2\x86" * 60 + b"K\1s.",
    "a text of 2 GiB": b"\x80\x02}X\1\0\0\0aX\xff\xff\xff\x7fb",
    "a bytearray of 1 TiB": b"\x80\x02}X\1\0\0\0acbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85Rs.",
    "a tensor of a size": b"\x80\x02}X\1\0\0\0actorch\nTensor\n\x8a\x05\0\0\0\0\1\x85Rs.",
    "a dict of integers with one hash": pickle.dumps(
        {"a": {(2**61 - 1) * i: None for i in range(1, 3000)}}, 2
    ),
    "an object that contains itself": b"\x80\x02}X\1\0\0\0a]q\0h\0as.",
}


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
@pytest.mark.parametrize("pickled", PICKLES.values(), ids=PICKLES)
def test_a_small_pickle_of_a_huge_object_is_refused(tmp_path: Path, pickled: bytes, legacy: bool) -> None:
    assert len(pickled) < 100_000
    source = tmp_path / "a.pt"
    source.write_bytes(torch_file(pickled, legacy=legacy))
    failure = run_case(lambda: import_checkpoint(source, tmp_path / "home", under="model", kind="torch"))
    assert failure is None, failure.text
    with pytest.raises(Corrupt):
        import_checkpoint(source, tmp_path / "home", under="model", kind="torch")
    with pytest.raises(Corrupt):
        safe_unpickler.load(pickled, safe_unpickler.TENSOR_NAMES, "bomb")


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
def test_objects_that_are_shared_a_few_times_are_imported(tmp_path: Path, legacy: bool) -> None:
    shared = {"betas": (0.9, 0.99), "names": [f"layer{i}" for i in range(500)]}
    state = {"w": torch.ones(3), "groups": [shared] * 50, "raw": bytearray(b"abc"), "tied": [shared]}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    import_checkpoint(tmp_path / "a.pt", tmp_path / "home")
    assert torch.equal(holdfast.open(tmp_path / "home")["w"], torch.ones(3))


def test_a_storage_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3)}, source, _use_new_zipfile_serialization=False)
    data = source.read_bytes()
    at = data.index(b"K\x03")  # elements of the storage
    source.write_bytes(data[:at] + b"J\xff\xff\xff\x7f" + data[at + 2 :])
    with pytest.raises(Corrupt, match="larger than its file"):
        import_checkpoint(source, tmp_path / "home", under="model")
