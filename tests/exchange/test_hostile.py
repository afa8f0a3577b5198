"""Untrusted sources: pickles that would run code, truncated files, files with wrong metadata."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import holdfast
from exchange.stock import save_dcp
from holdfast.checkpoint.exchange import safe_unpickler
from holdfast.checkpoint.exchange.importer import import_checkpoint
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Evil:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def refused(source: Path, error: type[HoldfastError], match: str, **options: Any) -> None:
    """Assert that an import is refused with this error, and does not create a home."""
    home = source.parent / "home-of-refused"
    with pytest.raises(error, match=match):
        import_checkpoint(source, home, **options)
    assert not home.exists() or not list(home.rglob("*.*"))


def make_dcp(folder: Path) -> Path:
    """Write a DCP checkpoint and return its only data file."""
    state = {"w": torch.randn(300, 40), "n": 3}
    save_dcp(state, folder)
    (data,) = folder.glob("*.distcp")
    return data


@contextlib.contextmanager
def changed_metadata(folder: Path) -> Iterator[Any]:
    """Write a DCP checkpoint, and yield its metadata to be changed."""
    make_dcp(folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    yield metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("is_archive", [True, False])
def test_torch_file_that_would_run_code_is_refused_and_named(tmp_path: Path, is_archive: bool) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"w": Evil(tmp_path / "ran")}, path, _use_new_zipfile_serialization=is_archive)
    refused(path, Unsupported, "mkdir")
    assert not (tmp_path / "ran").exists()


def member_by_getattr(self: enum.Enum, protocol: int) -> tuple[Any, ...]:
    """Pickle a member of an enum as Python 3.11.0 to 3.11.4 do."""
    return getattr, (type(self), self.name)


def test_dcp_metadata_of_early_python_3_11_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", member_by_getattr)
    make_dcp(tmp_path / "in")
    assert b"getattr" in (tmp_path / "in" / ".metadata").read_bytes()
    import_checkpoint(tmp_path / "in", tmp_path / "home")
    assert "w" in holdfast.open(tmp_path / "home")


class Attribute:
    """Object that is pickled as an attribute of a set."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (set, "union")


@pytest.mark.parametrize("key", ["w", "n"])
def test_dcp_item_that_would_run_code_is_refused_and_named(tmp_path: Path, key: str) -> None:
    """This holds for both kinds of items: the pickle of a tensor, and that of a value."""
    with changed_metadata(tmp_path / "in") as metadata:
        (data,) = (tmp_path / "in").glob("*.distcp")
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        info.offset = data.stat().st_size
        with data.open("ab") as file:
            torch.save(Evil(tmp_path / "ran"), file)
        info.length = data.stat().st_size - info.offset
    refused(tmp_path / "in", Unsupported, "mkdir")
    assert not (tmp_path / "ran").exists()
    if key == "n":
        import_checkpoint(tmp_path / "in", tmp_path / "home", only=["w"])
        assert holdfast.open(tmp_path / "home").keys() == ["w"]


@pytest.mark.parametrize("call", ["builtins eval", "builtins setattr", "os system", "torch load"])
def test_a_global_that_is_not_allowed_is_refused(call: str) -> None:
    code = b"c" + call.replace(" ", "\n").encode() + b"\n."
    for names in (safe_unpickler.DCP_NAMES, safe_unpickler.TENSOR_NAMES):
        with pytest.raises(Unsupported, match=call.split()[1]):
            safe_unpickler.load(code, names, "it")


def test_getattr_is_only_allowed_in_dcp_metadata() -> None:
    """There it is replaced by a function that only accepts stand-ins for enums."""
    code = b"cbuiltins\ngetattr\n."
    assert safe_unpickler.load(code, safe_unpickler.DCP_NAMES, "it") is not getattr
    with pytest.raises(Unsupported, match="getattr"):
        safe_unpickler.load(code, safe_unpickler.TENSOR_NAMES, "it")


def test_allowed_globals_have_no_side_effects() -> None:
    """Every allowed global becomes a plain value, a container, a stand-in, or a function of Holdfast."""
    for name, found in {**safe_unpickler.DCP_NAMES, **safe_unpickler.TENSOR_NAMES}.items():
        is_ours = getattr(found, "__module__", "") == safe_unpickler.__name__
        assert isinstance(found, str) or is_ours or found.__name__ in ("OrderedDict", "tuple", "set"), name


@given(st.binary(max_size=200))
def test_any_bytes_load_or_raise_an_error_of_holdfast(data: bytes) -> None:
    with contextlib.suppress(Corrupt, Unsupported):
        safe_unpickler.load(data, safe_unpickler.DCP_NAMES, "it")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_files_are_corrupt(tmp_path: Path, share: float) -> None:
    torch.save({"w": torch.randn(300, 40)}, tmp_path / "a.pt")
    save_file({"w": torch.randn(300, 40)}, tmp_path / "a.safetensors")
    for name, kind in (("a.pt", "torch"), ("a.safetensors", "safetensors")):
        path = tmp_path / name
        os.truncate(path, int(path.stat().st_size * share))
        refused(path, Corrupt, name, kind=kind)
    data = make_dcp(tmp_path / "in")
    os.truncate(data, int(data.stat().st_size * share))
    refused(tmp_path / "in", Corrupt, data.name)
    metadata = tmp_path / "in" / ".metadata"
    os.truncate(metadata, int(metadata.stat().st_size * share))
    refused(tmp_path / "in", Corrupt, ".metadata")


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    make_dcp(tmp_path / "in").unlink()
    refused(tmp_path / "in", NotFound, "distcp")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "gone.safetensors"}}')
    (folder / "other.safetensors").touch()
    refused(folder, NotFound, "gone.safetensors")


ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"w": ENTRY | {"data_offsets": [0, 4]}}, "has 4 bytes for F32"),
        ({"w": ENTRY | {"shape": [-2]}}, "shape"),
        ({"w": ENTRY | {"data_offsets": [-8, 0]}}, "data_offsets"),
        ({"w": ENTRY | {"data_offsets": [0, 8, 8]}}, "data_offsets"),
        ({"w": ENTRY | {"shape": 2}}, "shape"),
        ({"w": ENTRY | {"shape": ["2"]}}, "shape"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "data_offsets"),
        ({"w": []}, "'w'"),
        ({"w": ENTRY, "v": ENTRY}, "share the bytes"),
        # Torch cannot make it, although it has no bytes.
        ({"w": ENTRY | {"shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}}, "impossible shape"),
        ({"__metadata__": {"DCP_SHARDING_INFO": 1}, "w": ENTRY}, "DCP_SHARDING_INFO"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{"}, "w": ENTRY}, "DCP_SHARDING_INFO is not valid JSON"),
        ({"__metadata__": {"DCP_SHARDING_INFO": '{"v":{}}'}, "w": ENTRY}, "DCP_SHARDING_INFO of 'w'"),
    ],
)
def test_a_wrong_header_is_corrupt(tmp_path: Path, entries: Any, match: str) -> None:
    text = json.dumps(entries).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    refused(tmp_path / "a.safetensors", Corrupt, rf"a\.safetensors is not a safetensors file.*{match}")


@pytest.mark.parametrize(("changed", "match"), [(Evil(Path("ran")), "mkdir"), (Attribute(), "not an enum")])
def test_dcp_metadata_with_objects_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: object, match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with changed_metadata(tmp_path / "in") as metadata:
        metadata.planner_data = changed
    refused(tmp_path / "in", Unsupported, match)
    assert not (tmp_path / "ran").exists()


def test_dcp_metadata_with_a_path_outside_its_folder_is_corrupt(tmp_path: Path) -> None:
    with changed_metadata(tmp_path / "in") as metadata:
        for info in metadata.storage_data.values():
            info.relative_path = "../../etc/passwd"
    refused(tmp_path / "in", Corrupt, "passwd")


def test_chunks_that_do_not_cover_a_tensor_once_are_corrupt(tmp_path: Path) -> None:
    """The elements of an overlap may be as many as those of a gap."""
    with changed_metadata(tmp_path / "larger") as metadata:
        metadata.state_dict_metadata["w"].size = torch.Size([301, 40])
    with changed_metadata(tmp_path / "overlap") as metadata:
        (chunk,) = metadata.state_dict_metadata["w"].chunks
        half = dataclasses.replace(chunk, sizes=torch.Size([150, 40]))
        metadata.state_dict_metadata["w"].chunks = [half, half]
    for name in ("larger", "overlap"):
        refused(tmp_path / name, Corrupt, "w do not cover its shape")


def test_an_unknown_source_is_refused_with_the_supported_kinds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("notes.txt", "empty"):
        refused(tmp_path / name, InvalidInput, r"torch\.save.*safetensors.*\.metadata.*Hugging Face")
    refused(tmp_path / "gone", NotFound, "gone")
    refused(tmp_path / "gone", NotFound, "gone", kind="dcp")


REFUSED: dict[str, tuple[Any, type[HoldfastError], str, dict[str, Any]]] = {
    "no bytes": ({"deep": {"odd": torch.ones(2, device="meta")}}, Unsupported, "deep.odd.*meta", {}),
    "one name": ({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, InvalidInput, "a.b.c", {}),
    "no such prefix": ({"model": {"w": torch.ones(1)}}, NotFound, "mode", {"only": ["mode"]}),
    "a file as dcp": ({}, InvalidInput, "folder", {"kind": "dcp"}),
    "a file as hf": ({}, InvalidInput, "folder", {"kind": "hf"}),
    "unknown kind": ({}, InvalidInput, "Unknown kind of source", {"kind": "zip"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_imported_as_asked_is_refused_with_a_reason(tmp_path: Path, case: str) -> None:
    content, error, match, options = REFUSED[case]
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", error, match, **options)
    refused(tmp_path, InvalidInput, "file", kind="torch")


def test_a_home_of_holdfast_is_no_source(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "home")
    refused(tmp_path / "home", InvalidInput, "already a home of Holdfast")


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_sparse_tensors_and_complex128_are_imported(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"deep": {"odd": value, "plain": torch.ones(1)}}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "home", step=1)
    module = torch.nn.Module()
    module.register_buffer("odd", value * 0)
    module.register_buffer("plain", torch.zeros(1))
    holdfast.open(tmp_path / "home").load_into(module, "deep")
    assert torch.equal(module.get_buffer("odd").to_dense(), value.to_dense())


def test_a_source_that_is_not_a_dict_needs_a_key(tmp_path: Path) -> None:
    torch.save([torch.ones(1), 2], tmp_path / "a.pt")
    refused(tmp_path / "a.pt", InvalidInput, "under")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "home", under="rows")
    assert holdfast.open(tmp_path / "home").keys() == ["rows.0"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a valid source of each kind into a folder."""
    folder = tmp_path_factory.mktemp("good")
    state = {"w": torch.ones(30, 4), "n": 3, "o": {"s": [1, "x"], "v": torch.ones(3).bfloat16()}}
    save_dcp(state, folder / "dcp")
    torch.save(state, folder / "torch")
    save_file({"w": state["w"]}, folder / "safetensors")
    return folder


@given(
    kind=st.sampled_from(["dcp/.metadata", "dcp/__0_0.distcp", "torch", "safetensors"]),
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_changes_are_detected_or_change_values(good: Path, kind: str, changes: list[tuple[int, int]]) -> None:
    """An import of a changed source raises an error of Holdfast or writes a checkpoint."""
    store = MemoryStore()
    raw = bytearray((good / kind).read_bytes())
    for at, byte in changes:
        raw[at % len(raw)] = byte
    with tempfile.TemporaryDirectory() as folder:
        name = kind.partition("/")[0]
        source = Path(folder) / name
        (shutil.copytree if name == "dcp" else shutil.copy)(good / name, source)
        (Path(folder) / kind).write_bytes(raw)
        try:
            import_checkpoint(source, store, kind=name)
        except HoldfastError:
            assert list(store.list()) == []
        else:
            assert holdfast.open(store).verify().is_good


def write_shard(path: Path, offset: int, value: float) -> None:
    """Write two elements of a tensor, as DCP's safetensors writer does."""
    sharding = json.dumps({"x": {"saved_offsets": [offset]}})
    save_file({"x": torch.full((2,), value)}, path, metadata={"DCP_SHARDING_INFO": sharding})


def test_shards_that_overlap_and_leave_a_gap_are_refused(tmp_path: Path) -> None:
    """The elements of an overlap are as many as those of the gap, as with a shard of an older save."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number, offset in enumerate((0, 0, 4)):
        write_shard(folder / f"{number}.safetensors", offset, float(number))
    refused(folder, Corrupt, r"do not cover the shape \[6\] exactly once")
