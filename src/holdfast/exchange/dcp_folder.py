"""Reads folders of torch.distributed.checkpoint: its metadata by an allow-list, its items by ranges."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from holdfast.documents import read_integers
from holdfast.errors import Corrupt, Unsupported
from holdfast.exchange import allowlist
from holdfast.exchange.archive import find_tensor
from holdfast.exchange.offer import FileRegion, Offer, Offered, Region, read_range
from holdfast.exchange.selection import select
from holdfast.exchange.torch_files import MemoryRegion, load_bytes, offer_tree
from holdfast.exchange.trees import is_state_dict, is_told_by_names
from holdfast.format.cuts import Box
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.limits import MAX_DIMS
from holdfast.format.values import TensorRef

METADATA = ".metadata"
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def offer_folder(folder: Path, *, only: Iterable[str] | None = None) -> Offered:
    """What a DCP checkpoint offers.

    Args:
        folder: what `dcp.save` was given.
        only: prefixes of the keys that are looked at; None for all.

    Raises:
        Unsupported: its metadata or a value needs a class that is not on the list, or it was compressed.
        Corrupt: it is damaged, or a file is missing.
        NotFound: it holds nothing under a prefix.
    """
    path = folder / METADATA
    data = _whole(path)
    metadata = allowlist.load(data, allowlist.DCP_NAMES, str(path))
    try:
        return _Folder(folder, metadata.facts, num_bytes=len(data)).offer(only)
    except _DAMAGED as error:
        message = f"{path} is no metadata that this version of Holdfast knows: {error!r}."
        raise Corrupt(message, key=str(path)) from error


def _whole(path: Path) -> bytes:
    return bytes(read_range(path, 0, path.stat().st_size))


class _Folder:
    """The metadata of a DCP checkpoint, looked at."""

    def __init__(self, folder: Path, facts: dict[str, Any], *, num_bytes: int) -> None:
        self._left = num_bytes  # chunks that may be listed: lists of them can be shared
        self._folder = folder
        self._kinds: dict[str, allowlist.Record] = facts["state_dict_metadata"]
        self._paths: dict[str, tuple[Any, ...]] = facts.get("planner_data") or {}
        self._items: dict[tuple[str, tuple[int, ...] | None], allowlist.Record] = {}
        for index, info in facts["storage_data"].items():
            offset = index.facts.get("offset")
            self._items[index.facts["fqn"], None if offset is None else tuple(offset)] = info

    def offer(self, only: Iterable[str] | None) -> Offered:
        """The tensors and values under some prefixes."""
        tensors: list[Offer] = []
        tied: dict[str, str] = {}
        flat: dict[str, Any] = {}
        for name in select(self._kinds, only, str(self._folder)):
            kind = self._kinds[name]
            if isinstance(kind, allowlist.Tensor):
                tensors.append(self._tensor(name, kind))
                flat[name] = TensorRef(name)
                continue
            inner = offer_tree({name: self._value(name)})
            tensors += inner.tensors
            tied |= inner.tied
            flat[name] = inner.values.get(name, TensorRef(name))
            if flat[name] == {} and inner.tensors:
                flat[name] = {o.name[len(name) + 1 :]: TensorRef(o.name) for o in inner.tensors}
        nested = _nest(flat, self._paths)
        values = {
            key: {} if is_state_dict(key, tree) else tree
            for key, tree in nested.items()
            if not is_told_by_names(key, tree)
        }
        return Offered(tuple(tensors), tied, values)

    def _tensor(self, name: str, kind: allowlist.Record) -> Offer:
        shape = tuple(kind.facts["size"])
        properties = kind.facts["properties"]
        torch_name = properties.row[0] if properties.row else properties.facts["dtype"]
        dtype = allowlist.DTYPE_NAMES.get(torch_name)
        if dtype is None:
            message = f"{name} is of dtype {torch_name}, which no checkpoint can hold."
            raise Unsupported(message, key=name)
        self._left -= len(kind.facts["chunks"])
        if self._left < 0:
            message = "it lists more chunks than it has bytes"
            raise ValueError(message)
        read_integers(list(shape), max_items=MAX_DIMS)
        boxes = [Box(tuple(c.facts["offsets"]), tuple(c.facts["sizes"])) for c in kind.facts["chunks"]]
        for box in boxes:
            if not box.is_inside(shape):
                raise ValueError(f"a chunk of {name} at {box} is not inside {shape}")
        if sum(box.num_items for box in boxes) != math.prod(shape):
            message = f"The chunks of {name} do not cover its shape {list(shape)} once. It is damaged."
            raise Corrupt(message, key=name)
        regions = [
            ItemRegion(*self._place(name, box.offsets), dtype, box, name) for box in boxes if box.num_items
        ]
        return Offer(name, dtype, shape, tuple(regions))

    def _value(self, name: str) -> Any:
        path, start, length = self._place(name, None)
        return load_bytes(bytes(read_range(path, start, length)), f"{name} in {path.name}")

    def _place(self, name: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        info = self._items.get((name, offset))
        if info is None:
            raise Corrupt(f"{METADATA} does not say where {name} at {offset} is. It is damaged.", key=name)
        if info.facts.get("transform_descriptors"):
            how = ", ".join(map(str, info.facts["transform_descriptors"]))
            raise Unsupported(
                f"{name} was transformed ({how}) when it was saved; only plain items can be read."
            )
        relative, start, length = (info.facts[key] for key in ("relative_path", "offset", "length"))
        if Path(relative).is_absolute() or ".." in Path(relative).parts or min(start, length) < 0:
            raise Corrupt(f"{METADATA} says that {name} is in {relative!r}, which cannot be.", key=name)
        return self._folder / relative, start, length


@final
class ItemRegion(Region):
    """A chunk of a DCP checkpoint: a `torch.save` of one tensor in a range of a file.

    Where the tensor lies is looked up at the first read. One that is not plain is loaded whole, each time.
    """

    def __init__(self, path: Path, start: int, length: int, dtype: str, box: Box, name: str) -> None:
        self.box = box
        self._path = path
        self._start = start
        self._length = length
        self._dtype = dtype
        self._name = name
        self._region: FileRegion | None = None

    def read(self, box: Box) -> memoryview:
        """See `Region.read`."""
        if self._region is not None:
            return self._region.read(box)
        place = find_tensor(self._path, self._start, self._length)
        if place is None:
            return self._load().read(box)
        self._check(place.dtype, place.shape)
        self._region = FileRegion(self._path, place.start, self.box, ITEM_BYTES[self._dtype])
        return self._region.read(box)

    def _load(self) -> MemoryRegion:
        from holdfast.state.tensors import dtype_name

        data = bytes(read_range(self._path, self._start, self._length))
        tensor = load_bytes(data, f"{self._name} in {self._path.name}")
        self._check(dtype_name(tensor.dtype), tuple(tensor.shape))
        return MemoryRegion(tensor, self.box)

    def _check(self, dtype: str, shape: tuple[int, ...]) -> None:
        if (dtype, shape) != (self._dtype, self.box.lengths):
            message = (
                f"{self._path.name} holds {dtype}{list(shape)} for {self._name} at {list(self.box.offsets)}, "
                f"but {METADATA} says {self._dtype}{list(self.box.lengths)}: files of two saves are mixed."
            )
            raise Corrupt(message, key=self._name)


def _nest(flat: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The tree that was flattened when it was saved; a key without a path stays as it is."""
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *parents, last = paths.get(name, (name,))
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return {str(key): _as_lists(value) for key, value in root.items()}


def _as_lists(node: Any) -> Any:
    """Dicts whose keys are numbers were lists: torch keeps a dict's own keys as texts."""
    if type(node) not in (dict, collections.OrderedDict):
        return node
    if node and all(type(key) is int for key in node):
        return [_as_lists(node[key]) for key in sorted(node)]
    return {key: _as_lists(item) for key, item in node.items()}
