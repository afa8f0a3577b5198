"""Tensors in a file of torch.save must be inside their storages, and its archive must be unambiguous."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._tensor
import torch._utils

import holdfast
from campaigns.fuzz.bounded import run_case
from exchange.stock import archive, torch_file
from holdfast.checkpoint.exchange.importer import import_checkpoint
from holdfast.checkpoint.exchange.torch_archive import locate_tensor
from holdfast.checkpoint.exchange.torch_files import load_bytes
from holdfast.errors import Corrupt

FAR = 1 << 31
PLACES = {
    "an offset": (FAR, (2,), (1,)),
    "a size": (0, (FAR,), (1,)),
    "a stride": (0, (2,), (FAR,)),
    "a negative offset": (-1, (2,), (1,)),
    "a negative stride": (3, (2,), (-1,)),
    "one stride for two sizes": (0, (2, 2), (1,)),
    "one element too many": (1, (4,), (1,)),
}


class _Storage:
    """Storage of four elements that `_pickled` refers to."""

    def __init__(self, num_items: int, key: str = "0") -> None:
        self.facts = ("storage", torch.FloatStorage, key, "cpu", num_items)


class _Made:
    """Object that is pickled as a function call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class _Pickler(pickle.Pickler):
    legacy = False

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return (*obj.facts, None) if self.legacy else obj.facts
        return None


def _file(value: Any, *, legacy: bool) -> bytes:
    """Return a file of torch.save with one storage of four elements."""
    out = io.BytesIO()
    pickler = _Pickler(out, 2)
    pickler.legacy = legacy
    pickler.dump(value)
    return torch_file(out.getvalue(), torch.arange(4.0).numpy().tobytes(), legacy=legacy)


def _tensor(first: int, size: Any, stride: Any, num_items: int = 4) -> _Made:
    rebuild: Any = torch._utils._rebuild_tensor_v2
    return _Made(rebuild, _Storage(num_items), first, size, stride, False, OrderedDict())


both = pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])


def _check_refused(data: bytes, tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    source.write_bytes(data)
    for act in (
        lambda: import_checkpoint(source, tmp_path / "home", under="model", kind="torch"),
        lambda: load_bytes(data, "an item"),
    ):
        failure = run_case(act)
        assert failure is None, failure.text
        with pytest.raises(Corrupt):
            act()


@both
def test_an_unchanged_file_is_read(tmp_path: Path, legacy: bool) -> None:
    (tmp_path / "a.pt").write_bytes(_file({"w": _tensor(1, (3,), (1,))}, legacy=legacy))
    import_checkpoint(tmp_path / "a.pt", tmp_path / "home", under="model")
    assert torch.equal(holdfast.open(tmp_path / "home")["model.w"], torch.tensor([1.0, 2.0, 3.0]))


_REBUILD: Any = torch._utils._rebuild_tensor_v2
_OUTSIDE = (_Storage(4), FAR, (2,), (1,))
_QUANTIZED = (torch.per_tensor_affine, 0.1, 0)
REFUSED: dict[str, Any] = {
    **{f"{name} outside of the storage": _tensor(*place) for name, place in PLACES.items()},
    "a size as a list": _tensor(0, [FAR], (1,)),
    "a size as a dict": _tensor(0, {FAR: 1}, (1,)),
    "a size as a torch.Size": _tensor(0, _Made(torch.Size, (FAR,)), (1,)),
    # Torch would read beyond the end of the record in an archive that is not mapped.
    "a storage larger than its bytes": _tensor(0, (200,), (1,), num_items=200),
    "a storage with two sizes": [_tensor(0, (1,), (1,), num_items=1), _tensor(0, (4,), (1,))],
    "a subclass": _Made(
        torch._tensor._rebuild_from_type_v2, _REBUILD, torch.Tensor, (*_OUTSIDE, False, OrderedDict()), {}
    ),
    "a state": _Made(_REBUILD, _Storage(4), 0, (1,), (1,), False, OrderedDict(), state=_OUTSIDE),
    "a quantized tensor": _Made(
        torch._utils._rebuild_qtensor, _Storage(4), 0, (FAR,), (0,), _QUANTIZED, False, OrderedDict()
    ),
    "a call of a class": _Made(torch.Tensor, _Made(torch.Size, (FAR,))),
}


@both
@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_a_tensor_outside_its_storage_is_refused(tmp_path: Path, value: Any, legacy: bool) -> None:
    """Torch would enlarge the storage, by gigabytes if the offset is large."""
    _check_refused(_file({"w": value}, legacy=legacy), tmp_path)


def test_legacy_items_in_a_dcp_checkpoint_are_checked_too() -> None:
    with pytest.raises(Corrupt, match="needs more than"):
        load_bytes(_file(_tensor(FAR, (2,), (1,)), legacy=True), "an item")


# -- archives ----------------------------------------------------------------------------------------------

HARMLESS = {"data.pkl": pickle.dumps({"n": 1}, 2), "byteorder": b"little", "version": b"3\n"}


def _appended(name: str = "", comment: bytes = b"") -> bytes:
    """Return an archive with another pickle, or with a comment."""
    out = io.BytesIO(archive(HARMLESS))
    with zipfile.ZipFile(out, "a", zipfile.ZIP_STORED) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name:
            file.writestr(name, pickle.dumps({"n": 2}, 2))
        file.comment = comment
    return out.getvalue()


def _changed(data: bytes, old: bytes, new: bytes, which: int) -> bytes:
    """Return bytes with one of the places of `old` replaced."""
    at = -1
    for _ in range(which + 1):
        at = data.index(old, at + 1)
    return data[:at] + new + data[at + len(old) :]


def _with_zip64(reported: int) -> bytes:
    """Return an archive of zip64 whose locator is wrong by so many bytes."""
    data = archive(HARMLESS)
    here, count, num_bytes, start = struct.unpack_from("<2H2L", data, len(data) - 14)
    at = len(data) - 22
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, here, count, num_bytes, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, at + reported, 1)
    return data[:at] + record + locator + data[at:]


AMBIGUOUS: dict[str, Callable[[], bytes]] = {
    "a name twice": lambda: _appended("a/data.pkl"),
    "a name in two cases": lambda: _appended("a/DATA.PKL"),
    "a second folder": lambda: _appended("b/data.pkl"),
    "bytes before it": lambda: archive(HARMLESS)[:30] + archive(HARMLESS),
    "bytes after it": lambda: archive(HARMLESS) + bytes(8),
    "a comment": lambda: _appended(comment=b"PK\5\6 and more"),
    "a zip64 record elsewhere": lambda: _with_zip64(-8),
    "another name in a header": lambda: _changed(archive(HARMLESS), b"a/data.pkl", b"a/data.pk_", 0),
    "another name in the directory": lambda: _changed(archive(HARMLESS), b"a/version", b"a/data.pk", 1),
    "a name with a NUL": lambda: archive({**HARMLESS, "data.pkl_x": b"1"}).replace(b"pkl_", b"pkl\0"),
    "two fields of zip64": lambda: _with_extra(struct.pack("<HHQ", 1, 8, 5) * 2),
}


def _with_extra(extra: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, content in HARMLESS.items():
            info = zipfile.ZipInfo(f"a/{name}")
            info.extra = extra
            file.writestr(info, content)
    return out.getvalue()


@pytest.mark.parametrize("make", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_archive_is_refused(tmp_path: Path, make: Callable[[], bytes]) -> None:
    """Torch could load a different pickle than the one that was checked."""
    _check_refused(make(), tmp_path)
    (tmp_path / "item").write_bytes(make())
    with pytest.raises(Corrupt):
        locate_tensor(tmp_path / "item", 0, len(make()))


@pytest.mark.parametrize("data", [archive(HARMLESS), _with_zip64(0)], ids=["plain", "zip64"])
def test_an_unambiguous_archive_is_read(data: bytes) -> None:
    assert load_bytes(data, "an item") == {"n": 1}
