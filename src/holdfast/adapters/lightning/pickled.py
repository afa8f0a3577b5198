"""Checkpoint dictionaries of Lightning as one pickle without tensors, and the tensors by name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.format.limits import MAX_NAME_CHARS
from holdfast.checkpoint.state.tensors import is_savable
from holdfast.system.rawbytes import view_bytes

_PROTOCOL = 2
"""Protocol of the pickles of torch.save, which torch.load expects."""
_SMALL_BYTES = 16 << 10
"""Storages of at most so many bytes are compared by their content."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory of one or more tensors.

    Attributes:
        name: path of its first tensor in the dictionary, such as "state_dict.layer.weight".
        tensor: all of its memory: that tensor if it covers it, else its bytes.
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pickled:
    """Dictionary as torch.save stores it: a pickle, and the storages in the order of their keys.

    The storages are those of the live tensors, which training changes.
    """

    data: bytes
    storages: tuple[Storage, ...]

    def marks(self) -> tuple[object, ...]:
        """Return a mark per storage. It changes with each write by torch."""
        return tuple(_mark(one.tensor) for one in self.storages)


def _mark(tensor: torch.Tensor) -> object:
    if tensor.is_inference() or tensor.is_meta:
        return object()  # equal to nothing, since torch does not count its writes
    if tensor.nbytes <= _SMALL_BYTES and tensor.device.type == "cpu":
        return bytes(view_bytes(tensor)), tensor.dtype, tensor.shape  # made anew for each save, as a rule
    return tensor.data_ptr(), tensor.nbytes, tensor._version


def pickle_content(content: Mapping[str, Any]) -> Pickled:
    """Pickle a checkpoint dictionary as torch.save does, without the bytes of its tensors."""
    found = _Storages()
    out = io.BytesIO()
    _Pickler(out, found).dump(content)
    first = {one.untyped_storage()._cdata: (name, one) for name, one in _reversed_tensors(content)}
    taken: set[str] = set()
    storages = tuple(
        _name(i, storage, first.get(storage._cdata), taken) for i, storage in enumerate(found.ordered)
    )
    return Pickled(out.getvalue(), storages)


def _reversed_tensors(content: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield plain tensors with their paths, the first one last."""
    return reversed(list(_tensors(content, "")))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if is_savable(value):
            yield path.removeprefix("."), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{path}.{i}")


def _name(
    number: int,
    storage: torch.UntypedStorage,
    found: tuple[str, torch.Tensor] | None,
    taken: set[str],
) -> Storage:
    """Return a storage, named by the path of its first tensor or by its number."""
    path, tensor = found or (f"objects.{number}", None)
    if path in taken or not 0 < len(path) <= MAX_NAME_CHARS // 2 or "@" in path:
        path = f"storages.{number}"
    taken.add(path)
    if tensor is not None and tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
        return Storage(path, tensor.detach())
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return Storage(path, view)


class _Storages:
    """Storages met while pickling, numbered in this order."""

    def __init__(self) -> None:
        self.ordered: list[torch.UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def refer_to(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> str:
        """Return the key of a storage, a new one at its first occurrence."""
        address = storage.data_ptr() if storage.device.type != "meta" else 0
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                f"Two tensors in the checkpoint view the same memory as {self._dtypes[address]} and {dtype}, "
                "which a file of torch.save cannot hold. Nothing was saved. Clone one of them."
            )
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.ordered))
            self.ordered.append(storage)
        return key


class _Pickler(pickle.Pickler):
    """Pickler that refers to storages by keys, in the format of torch.save."""

    def __init__(self, out: io.BytesIO, found: _Storages) -> None:
        super().__init__(out, protocol=_PROTOCOL)
        self._found = found

    def persistent_id(self, obj: Any, /) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, count = obj._untyped_storage, obj.dtype, obj._size()
            kind = getattr(torch, obj._pickle_storage_type())
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, count, kind = obj, torch.uint8, obj.nbytes(), torch.UntypedStorage
        else:
            return None
        key = self._found.refer_to(storage, dtype)
        return ("storage", kind, key, torch.serialization.location_tag(storage), count)
