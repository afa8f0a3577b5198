"""Reader of files of torch.save: weights only and memory-mapped, so that a file may be larger than memory."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

from typing_extensions import override

from holdfast.checkpoint.exchange.safe_unpickler import StorageCheck, check_pickle
from holdfast.checkpoint.exchange.source import RegionReader, Source, SourceTensor, read_range
from holdfast.checkpoint.exchange.torch_archive import DAMAGED, check_layout
from holdfast.checkpoint.exchange.trees import flatten
from holdfast.checkpoint.format.partitioning import Region
from holdfast.errors import Corrupt, InvalidInput, NotFound, RetryLater, Unsupported

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
    is_archive = _is_archive(path)
    try:
        with path.open("rb") as file:
            if is_archive:
                check_archive(file, str(path))
            else:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    _check_legacy(mapped, len(mapped), str(path))
    except OSError as error:
        raise RetryLater(f"{path} could not be read: {error.strerror}.", key=str(path)) from error
    except ValueError as error:  # an empty file cannot be mapped
        raise Corrupt(f"{path} is not a complete file of torch.save: {error}", key=str(path)) from error
    return _weights_only(path, str(path), **{"mmap": is_archive, **options})


def load_bytes(data: bytes, what: str) -> Any:
    """Load an object that torch.save wrote into bytes."""
    if data.startswith(_ARCHIVE):
        check_archive(io.BytesIO(data), what)
    else:
        _check_legacy(io.BytesIO(data), len(data), what)
    return _weights_only(io.BytesIO(data), what)


def check_archive(file: IO[bytes], what: str) -> None:
    """Check that an archive is not compressed, and that its pickles are safe to load."""
    try:
        with zipfile.ZipFile(file) as archive:
            check = _check_of_records(archive, f"{check_layout(archive)}data/")
            for member in archive.infolist():
                if member.filename.lower().endswith("data.pkl"):
                    check_pickle(archive.read(member), storages=check)
    except OSError as error:
        if error.errno in (None, errno.EINVAL):
            raise Corrupt(f"{what} is not a complete file of torch.save: {error}", key=what) from error
        raise RetryLater(f"{what} could not be read: {error.strerror}.", key=what) from error
    except (*DAMAGED, ValueError) as error:
        raise Corrupt(f"{what} is not a complete file of torch.save: {error}", key=what) from error


def _check_of_records(archive: zipfile.ZipFile, root: str) -> StorageCheck:
    """Return a check that a storage is not larger than its record in an archive."""
    sizes = {one.filename.removeprefix(root): one.file_size for one in archive.infolist()}

    def check(key: str, num_bytes: int) -> None:
        if num_bytes > sizes.get(key, -1):
            raise ValueError(f"the storage {key[:100]!r} is larger than its record")

    return check


def _check_legacy(file: io.BytesIO | mmap.mmap, num_bytes: int, what: str) -> None:
    """Check the pickles of a file of torch before 1.6."""
    left = num_bytes

    def check(key: str, num_bytes: int) -> None:
        nonlocal left
        left -= num_bytes
        if left < 0:
            raise ValueError(f"the storage {key[:100]!r} is larger than its file")

    try:
        for _ in range(_NUM_LEGACY_PICKLES):
            check_pickle(file, storages=check)
    except ValueError as error:
        raise Corrupt(f"{what} is not a complete file of torch.save: {error}", key=what) from error


def _weights_only(source: Any, what: str, **options: Any) -> Any:
    """Call `torch.load(weights_only=True)`, on the CPU unless `options` override that."""
    import pickle

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
    except Exception as error:  # a damaged file can fail in any way, even with an invalid seek
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise RetryLater(f"{what} could not be read: {error}.", key=what) from error
        raise Corrupt(f"{what} is not a complete file of torch.save: {error}", key=what) from error


def _is_archive(path: Path) -> bool:
    try:
        size = path.stat().st_size
        return bytes(read_range(path, 0, min(4, size))) == _ARCHIVE
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist.", key=str(path)) from None
    except OSError as error:
        raise RetryLater(f"{path} could not be read: {error.strerror}.", key=str(path)) from error


def open_tree(tree: dict[str, Any]) -> Source:
    """Return a tree of tensors and plain values as a source."""
    from holdfast.checkpoint.state.tensors import dtype_name

    tensors, tied, values = flatten(tree)
    pages = Pages()
    found = (
        SourceTensor(name, dtype_name(one.dtype), tuple(one.shape), (MemoryReader(one, pages=pages),))
        for name, one in tensors.items()
    )
    return Source(tuple(found), tied, values)


@final
class MemoryReader(RegionReader):
    """Reader of a region of a CPU tensor; `pages` receives what was read, if it may be mapped from a file."""

    def __init__(
        self, tensor: torch.Tensor, region: Region | None = None, pages: Pages | None = None
    ) -> None:
        self._pages = pages
        self._tensor = tensor.detach().resolve_conj().resolve_neg()
        self.region = region or Region.whole(tuple(tensor.shape))

    @override
    def read(self, region: Region) -> memoryview:
        part = self._tensor
        for dim, (at, start, length) in enumerate(
            zip(region.offsets, self.region.offsets, region.sizes, strict=True)
        ):
            part = part.narrow(dim, at - start, length)
        dense = part.contiguous()
        copied = memoryview(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        if self._pages is not None:
            self._pages.add(part)
        return copied


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
