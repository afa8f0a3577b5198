"""Readers of files of torch.save, weights only and memory-mapped, and of DCP folders, by ranges."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import mmap
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

from msgspec import convert

from holdfast.checkpoint.exchange import safe_unpickler
from holdfast.checkpoint.exchange.safe_unpickler import check_pickle
from holdfast.checkpoint.exchange.source import RegionReader, Source, SourceTensor, file_reader, read_range
from holdfast.checkpoint.exchange.torch_archive import check_layout, locate_tensor
from holdfast.checkpoint.exchange.trees import flatten, nest, select, without_implied
from holdfast.checkpoint.format.agreement import covers_once
from holdfast.checkpoint.format.catalog import check_tensor
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import Region
from holdfast.checkpoint.format.limits import Sizes
from holdfast.checkpoint.format.values import TensorRef
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported

if TYPE_CHECKING:
    import torch

_GLOBAL = re.compile(r"GLOBAL (\S+)|add_safe_globals\(\[([^\]]+)\]\)")
_MADV_PAGEOUT = 21
_ARCHIVE = b"PK\x03\x04"
_NUM_LEGACY_PICKLES = 5  # magic number, protocol, system information, the object, keys of its storages
_MAX_MAPPED_BYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def open_files(paths: Iterable[Path], *, under: str | None = None) -> Source:
    """Open files of torch.save, each a dict, as one source. A single tensor or list needs the key `under`."""
    tree: Any = {}
    for path in paths:
        loaded = load(path)
        if not isinstance(loaded, dict):
            if under is None:
                raise InvalidInput(
                    f"{path} contains a {type(loaded).__name__}, not a dict. Choose a key for it with "
                    "--under KEY.",
                    key=str(path),
                )
            tree = loaded
            continue
        twice = sorted(map(str, tree.keys() & loaded.keys()))
        if twice:
            raise InvalidInput(
                f"{path} contains {twice[0]!r}, which another file contains too.", key=twice[0]
            )
        tree.update(loaded)
    if under is None:
        wrong = [key for key in tree if not isinstance(key, str)]
        if wrong:
            raise InvalidInput(
                f"The top-level key {wrong[0]!r} is not a string. Put everything under a key with --under "
                "KEY."
            )
    return open_tree(tree if under is None else {under: tree})


def load(path: Path, **options: Any) -> Any:
    """Load a file of torch.save, with options of torch.load. Tensors of an archive are mapped."""
    with _reading(str(path)):
        is_archive = bytes(read_range(path, 0, min(4, path.stat().st_size))) == _ARCHIVE
        with path.open("rb") as file:
            if is_archive:
                _check_archive(file)
            else:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    _check_legacy(mapped, len(mapped))
        return _weights_only(path, str(path), **{"mmap": is_archive, **options})


def load_bytes(data: bytes, what: str) -> Any:
    """Load an object that torch.save wrote into bytes."""
    with _reading(what):
        if data.startswith(_ARCHIVE):
            _check_archive(io.BytesIO(data))
        else:
            _check_legacy(io.BytesIO(data), len(data))
        return _weights_only(io.BytesIO(data), what)


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Translate errors of the disk, and those of a damaged file, which can fail in any way."""
    try:
        yield
    except (HoldfastError, ImportError):
        raise
    except FileNotFoundError:
        raise NotFound(f"{what} does not exist.", key=what) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise RetryLater(f"{what} could not be read: {error.strerror}.", key=what) from error
        raise Corrupt(f"{what} is not a complete file of torch.save: {error}", key=what) from error


def _check_archive(file: IO[bytes]) -> None:
    """Check that an archive is not compressed, and that its pickles are safe to load."""
    with zipfile.ZipFile(file) as archive:
        root = f"{check_layout(archive)}data/"
        sizes = {one.filename.removeprefix(root): one.file_size for one in archive.infolist()}

        def check(key: str, num_bytes: int) -> None:
            if num_bytes > sizes.get(key, -1):
                raise ValueError(f"the storage {key[:100]!r} is larger than its record")

        for member in archive.infolist():
            if member.filename.lower().endswith("data.pkl"):
                check_pickle(archive.read(member), storages=check)


def _check_legacy(file: io.BytesIO | mmap.mmap, num_bytes: int) -> None:
    """Check the pickles of a file of torch before 1.6."""
    left = num_bytes

    def check(key: str, num_bytes: int) -> None:
        nonlocal left
        left -= num_bytes
        if left < 0:
            raise ValueError(f"the storage {key[:100]!r} is larger than its file")

    for _ in range(_NUM_LEGACY_PICKLES):
        check_pickle(file, storages=check)


def _weights_only(source: Any, what: str, **options: Any) -> Any:
    """Call `torch.load(weights_only=True)`, on the CPU unless `options` override that."""
    import torch

    try:
        return torch.load(source, **{"map_location": "cpu", **options, "weights_only": True})
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        if found is None:
            raise Corrupt(f"{what} cannot be unpickled: {error}", key=what) from error
        refused = found[1] or found[2]
        raise Unsupported(
            f"{what} needs {refused}, and loading that could run code, so it was not loaded. If you trust "
            "its author, load it with the program that wrote it, and save tensors and plain values again "
            "with torch.save; or allow the name with torch.serialization.add_safe_globals.",
            key=refused,
        ) from error


def open_tree(tree: dict[str, Any]) -> Source:
    """Return a tree of tensors and plain values as a source."""
    from holdfast.checkpoint.state.tensors import dtype_name

    tensors, tied, values = flatten(tree)
    pages = Pages()
    found = (
        SourceTensor(name, dtype_name(one.dtype), tuple(one.shape), (memory_reader(one, pages=pages),))
        for name, one in tensors.items()
    )
    return Source(tuple(found), tied, values)


def memory_reader(
    tensor: torch.Tensor, region: Region | None = None, pages: Pages | None = None
) -> RegionReader:
    """Return a reader of a region of a CPU tensor; `pages` receives what was read, if it may be mapped."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    of = region or Region.whole(tuple(tensor.shape))

    def read(wanted: Region) -> memoryview:
        part = whole
        for dim, (at, start, length) in enumerate(zip(wanted.offsets, of.offsets, wanted.sizes, strict=True)):
            part = part.narrow(dim, at - start, length)
        dense = part.contiguous()
        copied = memoryview(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        if pages is not None:
            pages.add(part)
        return copied

    return RegionReader(of, read)


@final
class Pages:
    """Pages that were read, which are regularly released to the kernel.

    This keeps a mapped file from filling the memory. The kernel keeps pages that were changed. Where pages
    cannot be released, the kernel reclaims mapped pages itself when memory is short. Pages of a tensor that
    is not contiguous are left to the kernel, because every slice of it needs most of them.
    """

    def __init__(self) -> None:
        self._used: list[tuple[int, int]] = []  # start, bytes
        self._num_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Record that a tensor has been read."""
        if _libc is None or not tensor.nbytes or not tensor.is_contiguous():
            return
        start = tensor.data_ptr() - tensor.data_ptr() % mmap.PAGESIZE
        self._used.append((start, tensor.data_ptr() + tensor.nbytes - start))
        self._num_bytes += tensor.nbytes
        if self._num_bytes < _MAX_MAPPED_BYTES:  # pages with small tensors would be read many times
            return
        for first, num_bytes in self._used:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _MADV_PAGEOUT)
        self._used, self._num_bytes = [], 0


DCP_METADATA = ".metadata"
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def open_dcp_folder(folder: Path, *, only: Iterable[str] | None = None) -> Source:
    """Open a DCP checkpoint: the keys with any of the prefixes, or all."""
    path = folder / DCP_METADATA
    data = bytes(read_range(path, 0, path.stat().st_size))
    metadata = safe_unpickler.load(data, safe_unpickler.DCP_NAMES, str(path))
    try:
        return _DcpFolder(folder, metadata.fields, num_bytes=len(data)).open(only)
    except _DAMAGED as error:
        raise Corrupt(
            f"{path} is not metadata that this version of Holdfast can read: {error!r}.", key=str(path)
        ) from error


class _DcpFolder:
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
        return Source(tuple(tensors), tied, without_implied(nested))

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
        convert(shape, Sizes)  # its error is a ValueError
        chunks = [one.fields for one in entry.fields["chunks"]]
        regions = [Region(tuple(one["offsets"]), tuple(one["sizes"])) for one in chunks]
        for region in regions:
            if not region.is_inside(shape):
                raise ValueError(f"a chunk of {name} at {region} is not inside {shape}")
        check_tensor(name, dtype, shape)
        if not covers_once(name, shape, regions):
            raise Corrupt(
                f"The chunks of {name} do not cover its shape {list(shape)} exactly once. The source is "
                "damaged.",
                key=name,
            )
        readers = [
            _item_reader(*self._range_of(name, region.offsets), dtype, region, name)
            for region in regions
            if region.num_items
        ]
        return SourceTensor(name, dtype, shape, tuple(readers))

    def _range_of(self, name: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
        info = self._items.get((name, offset))
        if info is None:
            raise Corrupt(
                f"{DCP_METADATA} does not list the file of {name} at {offset}. It is damaged.", key=name
            )
        if info.fields.get("transform_descriptors"):
            transforms = ", ".join(map(str, info.fields["transform_descriptors"]))
            raise Unsupported(
                f"{name} was transformed ({transforms}) when it was saved. Only plain items can be read."
            )
        relative, start, length = (info.fields[key] for key in ("relative_path", "offset", "length"))
        if Path(relative).is_absolute() or ".." in Path(relative).parts or min(start, length) < 0:
            raise Corrupt(f"{DCP_METADATA} has an invalid path for {name}: {relative!r}.", key=name)
        return self._folder / relative, start, length


def _item_reader(path: Path, start: int, length: int, dtype: str, region: Region, name: str) -> RegionReader:
    """Return a reader of a chunk of a DCP checkpoint: a `torch.save` of one tensor in a range of a file."""

    def check(found_dtype: str, shape: tuple[int, ...]) -> None:
        if (found_dtype, shape) != (dtype, region.sizes):
            found, listed = f"{found_dtype}{list(shape)}", f"{dtype}{list(region.sizes)}"
            raise Corrupt(
                f"{path.name} contains {found} for {name} at {list(region.offsets)}, but {DCP_METADATA} "
                f"lists {listed}: files of two saves are mixed.",
                key=name,
            )

    @functools.cache  # at the first read
    def locate() -> RegionReader | None:
        location = locate_tensor(path, start, length)
        if location is None:
            return None
        check(location.dtype, location.shape)
        return file_reader(path, location.start, region, ITEM_BYTES[dtype])

    def read(part: Region) -> memoryview:
        if (located := locate()) is not None:
            return located.read(part)
        from holdfast.checkpoint.state.tensors import dtype_name

        # A tensor that is not contiguous is loaded whole by every read.
        tensor = load_bytes(bytes(read_range(path, start, length)), f"{name} in {path.name}")
        check(dtype_name(tensor.dtype), tuple(tensor.shape))
        return memory_reader(tensor, region).read(part)

    return RegionReader(region, read)
