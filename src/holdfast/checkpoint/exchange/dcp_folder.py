"""Reader of DCP folders: metadata with a list of allowed names, items by ranges."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from holdfast.checkpoint.exchange import safe_unpickler
from holdfast.checkpoint.exchange.source import FileReader, RegionReader, Source, SourceTensor, read_range
from holdfast.checkpoint.exchange.torch_archive import locate_tensor
from holdfast.checkpoint.exchange.torch_files import MemoryReader, load_bytes, open_tree
from holdfast.checkpoint.exchange.trees import is_named_tensor, is_state_dict, nest, select
from holdfast.checkpoint.format.agreement import covers_once
from holdfast.checkpoint.format.catalog import check_size
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.limits import MAX_DIMS
from holdfast.checkpoint.format.partitioning import Region
from holdfast.checkpoint.format.values import TensorRef
from holdfast.errors import Corrupt, Unsupported
from holdfast.system.documents import read_integers

METADATA = ".metadata"
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def open_folder(folder: Path, *, only: Iterable[str] | None = None) -> Source:
    """Open a DCP checkpoint: the keys with any of the prefixes, or all."""
    path = folder / METADATA
    data = bytes(read_range(path, 0, path.stat().st_size))
    metadata = safe_unpickler.load(data, safe_unpickler.DCP_NAMES, str(path))
    try:
        return _Folder(folder, metadata.fields, num_bytes=len(data)).open(only)
    except _DAMAGED as error:
        raise Corrupt(
            f"{path} is not metadata that this version of Holdfast can read: {error!r}.", key=str(path)
        ) from error


class _Folder:
    """Parsed metadata of a DCP checkpoint."""

    def __init__(self, folder: Path, fields: dict[str, Any], *, num_bytes: int) -> None:
        self._max_chunks = num_bytes  # chunks that may be listed, because a pickle can share lists of them
        self._folder = folder
        self._entries: dict[str, safe_unpickler.StandIn] = fields["state_dict_metadata"]
        self._paths: dict[str, tuple[Any, ...]] = fields.get("planner_data") or {}
        self._items: dict[tuple[str, tuple[int, ...] | None], safe_unpickler.StandIn] = {}
        for index, info in fields["storage_data"].items():
            offset = index.fields.get("offset")
            self._items[index.fields["fqn"], None if offset is None else tuple(offset)] = info

    def open(self, only: Iterable[str] | None) -> Source:
        """Return the tensors and values with some prefixes."""
        tensors: list[SourceTensor] = []
        tied: dict[str, str] = {}
        flat: dict[str, Any] = {}
        for name in select(self._entries, only, str(self._folder)):
            entry = self._entries[name]
            if isinstance(entry, safe_unpickler.Tensor):
                tensors.append(self._tensor(name, entry))
                flat[name] = TensorRef(name)
                continue
            path, start, length = self._range_of(name, None)
            data = bytes(read_range(path, start, length))
            inner = open_tree({name: load_bytes(data, f"{name} in {path.name}")})
            tensors += inner.tensors
            tied |= inner.tied
            flat[name] = inner.values.get(name, TensorRef(name))
            if flat[name] == {} and inner.tensors:
                flat[name] = {o.name[len(name) + 1 :]: TensorRef(o.name) for o in inner.tensors}
        nested = nest({self._paths.get(name, (name,)): value for name, value in flat.items()})
        values = {
            key: {} if is_state_dict(key, tree) else tree
            for key, tree in nested.items()
            if not is_named_tensor(key, tree)
        }
        return Source(tuple(tensors), tied, values)

    def _tensor(self, name: str, entry: safe_unpickler.StandIn) -> SourceTensor:
        shape = tuple(entry.fields["size"])
        properties = entry.fields["properties"]
        torch_name = properties.args[0] if properties.args else properties.fields["dtype"]
        dtype = safe_unpickler.DTYPE_NAMES.get(torch_name)
        if dtype is None:
            raise Unsupported(f"{name} has dtype {torch_name}, which a checkpoint cannot hold.", key=name)
        self._max_chunks -= len(entry.fields["chunks"])
        if self._max_chunks < 0:
            raise ValueError("it lists more chunks than it has bytes")
        read_integers(list(shape), max_items=MAX_DIMS)
        chunks = [one.fields for one in entry.fields["chunks"]]
        regions = [Region(tuple(one["offsets"]), tuple(one["sizes"])) for one in chunks]
        for region in regions:
            if not region.is_inside(shape):
                raise ValueError(f"a chunk of {name} at {region} is not inside {shape}")
        check_size(name, dtype, shape)
        if not covers_once(name, shape, regions):
            raise Corrupt(
                f"The chunks of {name} do not cover its shape {list(shape)} exactly once. The source is "
                "damaged.",
                key=name,
            )
        readers = [
            ItemReader(*self._range_of(name, region.offsets), dtype, region, name)
            for region in regions
            if region.num_items
        ]
        return SourceTensor(name, dtype, shape, tuple(readers))

    def _range_of(self, name: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        info = self._items.get((name, offset))
        if info is None:
            raise Corrupt(
                f"{METADATA} does not list the file of {name} at {offset}. It is damaged.", key=name
            )
        if info.fields.get("transform_descriptors"):
            transforms = ", ".join(map(str, info.fields["transform_descriptors"]))
            raise Unsupported(
                f"{name} was transformed ({transforms}) when it was saved. Only plain items can be read."
            )
        relative, start, length = (info.fields[key] for key in ("relative_path", "offset", "length"))
        if Path(relative).is_absolute() or ".." in Path(relative).parts or min(start, length) < 0:
            raise Corrupt(f"{METADATA} has an invalid path for {name}: {relative!r}.", key=name)
        return self._folder / relative, start, length


@final
class ItemReader(RegionReader):
    """Chunk of a DCP checkpoint: a `torch.save` of one tensor in a range of a file.

    The first read locates the tensor. A tensor that is not contiguous is loaded whole by every read.
    """

    def __init__(self, path: Path, start: int, length: int, dtype: str, region: Region, name: str) -> None:
        self.region, self._name, self._dtype = region, name, dtype
        self._path, self._start, self._length = path, start, length
        self._reader: FileReader | None = None

    @override
    def read(self, region: Region) -> memoryview:
        if self._reader is not None:
            return self._reader.read(region)
        location = locate_tensor(self._path, self._start, self._length)
        if location is not None:
            self._check(location.dtype, location.shape)
            self._reader = FileReader(self._path, location.start, self.region, ITEM_BYTES[self._dtype])
            return self._reader.read(region)
        from holdfast.checkpoint.state.tensors import dtype_name

        data = bytes(read_range(self._path, self._start, self._length))
        tensor = load_bytes(data, f"{self._name} in {self._path.name}")
        self._check(dtype_name(tensor.dtype), tuple(tensor.shape))
        return MemoryReader(tensor, self.region).read(region)

    def _check(self, dtype: str, shape: tuple[int, ...]) -> None:
        if (dtype, shape) != (self._dtype, self.region.sizes):
            raise Corrupt(
                f"{self._path.name} contains {dtype}{list(shape)} for {self._name} at "
                f"{list(self.region.offsets)}, but {METADATA} lists {self._dtype}{list(self.region.sizes)}: "
                "files of two saves are mixed.",
                key=self._name,
            )
