"""Reads files of torch.save, weights only and mapped into memory, so that they may be larger than it."""

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

from holdfast.errors import Corrupt, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.exchange.archive import DAMAGED
from holdfast.exchange.offer import Offer, Offered, Region, read_range
from holdfast.exchange.pickles import Storages, check_pickle
from holdfast.exchange.trees import Gathered, gather
from holdfast.exchange.zip_layout import check_layout
from holdfast.format.cuts import Box

if TYPE_CHECKING:
    import torch

_GLOBAL = re.compile(r"GLOBAL (\S+)|add_safe_globals\(\[([^\]]+)\]\)")
_MADV_PAGEOUT = 21
_ARCHIVE = b"PK\x03\x04"
_NUM_LEGACY_PICKLES = 5  # magic number, protocol, facts of the system, the object, keys of its storages
_MAX_MAPPED_BYTES = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def offer_files(paths: Iterable[Path], *, under: str | None = None) -> Offered:
    """What files of torch.save offer, all together.

    Args:
        paths: files of one checkpoint, each a dict; a tensor or list alone needs `under`.
        under: top-level key that everything is put under.

    Raises:
        Unsupported: a file needs a class that weights-only loading refuses; nothing of it was run.
        Corrupt: a file is damaged or truncated.
        InvalidInput: two tensors with one name, or a value that no checkpoint can hold.
    """
    tree: Any = {}
    for path in paths:
        loaded = load(path)
        if not isinstance(loaded, dict):
            if under is None:
                message = (
                    f"{path} holds a {type(loaded).__name__}, not a dict: say under which key it is to stand "
                    "(--under KEY)."
                )
                raise InvalidInput(message, key=str(path))
            tree = loaded
            continue
        twice = sorted(map(str, tree.keys() & loaded.keys()))
        if twice:
            raise InvalidInput(f"{path} holds {twice[0]!r}, which another file holds too.", key=twice[0])
        tree.update(loaded)
    if under is None:
        wrong = [key for key in tree if not isinstance(key, str)]
        if wrong:
            message = (
                f"The top-level key {wrong[0]!r} is no string: say under which key all is to stand "
                "(--under KEY)."
            )
            raise InvalidInput(message)
    return offer_tree(tree if under is None else {under: tree})


def load(path: Path, **options: Any) -> Any:
    """Return the object in a file of torch.save; tensors are mapped from it where the file is an archive.

    Args:
        path: the file.
        options: for `torch.load`, such as `map_location`.

    Raises:
        Unsupported: loading it would run code.
        Corrupt: it is damaged or truncated.
        NotFound: there is no such file.
        RetryLater: it could not be read.
    """
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
        raise Corrupt(f"{path} is no whole file of torch.save: {error}", key=str(path)) from error
    return _weights_only(path, str(path), **{"mmap": is_archive, **options})


def load_bytes(data: bytes, what: str) -> Any:
    """Return the object that torch.save wrote into bytes.

    Raises:
        Unsupported: loading it would run code.
        Corrupt: it is damaged or truncated.
    """
    if data.startswith(_ARCHIVE):
        check_archive(io.BytesIO(data), what)
    else:
        _check_legacy(io.BytesIO(data), len(data), what)
    return _weights_only(io.BytesIO(data), what)


def check_archive(file: IO[bytes], what: str) -> None:
    """Check that an archive is no larger unpacked than it is, and what its pickle asks for.

    Raises:
        Corrupt: a member is compressed, its pickle asks for too much, or the archive is damaged.
        RetryLater: it could not be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            check = _check_of_records(archive, f"{check_layout(archive)}data/")
            for member in archive.infolist():
                if member.filename.lower().endswith("data.pkl"):
                    check_pickle(archive.read(member), storages=check)
    except OSError as error:
        if error.errno in (None, errno.EINVAL):
            raise Corrupt(f"{what} is no whole file of torch.save: {error}", key=what) from error
        raise RetryLater(f"{what} could not be read: {error.strerror}.", key=what) from error
    except (*DAMAGED, ValueError) as error:
        raise Corrupt(f"{what} is no whole file of torch.save: {error}", key=what) from error


def _check_of_records(archive: zipfile.ZipFile, root: str) -> Storages:
    """Return the check that a storage is no larger than its record in an archive."""
    sizes = {one.filename.removeprefix(root): one.file_size for one in archive.infolist()}

    def check(key: str, num_bytes: int) -> None:
        if num_bytes > sizes.get(key, -1):
            raise ValueError(f"the storage {key[:100]!r} is larger than its record")

    return check


def _check_legacy(file: io.BytesIO | mmap.mmap, num_bytes: int, what: str) -> None:
    """Check what the pickles of a file ask for that torch wrote before 1.6.

    Raises:
        Corrupt: one asks for too much, or is not whole.
    """
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
        raise Corrupt(f"{what} is no whole file of torch.save: {error}", key=what) from error


def _weights_only(source: Any, what: str, **options: Any) -> Any:
    """Call `torch.load(weights_only=True)`, on the CPU unless `options` say otherwise."""
    import pickle

    import torch

    try:
        return torch.load(source, **{"map_location": "cpu", **options, "weights_only": True})
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        if found is None:
            raise Corrupt(f"{what} cannot be unpickled: {error}", key=what) from error
        refused = found[1] or found[2]
        message = (
            f"{what} needs {refused}, and loading that could run code; it was not loaded. If you trust its "
            "author, load it with the program that wrote it, and save tensors and plain values anew with "
            "torch.save; or allow the name by torch.serialization.add_safe_globals."
        )
        raise Unsupported(message, key=refused) from error
    except Exception as error:  # a damaged file can fail in any way, also by a seek to where no file is
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise RetryLater(f"{what} could not be read: {error}.", key=what) from error
        raise Corrupt(f"{what} is no whole file of torch.save: {error}", key=what) from error


def _is_archive(path: Path) -> bool:
    try:
        size = path.stat().st_size
        return bytes(read_range(path, 0, min(4, size))) == _ARCHIVE
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist.", key=str(path)) from None
    except OSError as error:
        raise RetryLater(f"{path} could not be read: {error.strerror}.", key=str(path)) from error


def offer_tree(tree: dict[str, Any]) -> Offered:
    """What a tree of tensors and plain values offers.

    Raises:
        Unsupported: a tensor that no checkpoint can hold.
        InvalidInput: two tensors with one name.
    """
    gathered: Gathered = gather(tree)
    pages = Pages()
    offers = tuple(_offer(name, tensor, pages) for name, tensor in gathered.tensors.items())
    return Offered(offers, gathered.tied, gathered.values)


def _offer(name: str, tensor: torch.Tensor, pages: Pages) -> Offer:
    from holdfast.state.tensors import dtype_name

    shape = tuple(tensor.shape)
    return Offer(name, dtype_name(tensor.dtype), shape, (MemoryRegion(tensor, pages=pages),))


@final
class MemoryRegion(Region):
    """A tensor in this process's memory, perhaps mapped from a file, as a region.

    Args:
        tensor: on the CPU; of any strides.
        box: which region it is; default all of its tensor.
        pages: told what was read, if that may be mapped from a file.
    """

    def __init__(self, tensor: torch.Tensor, box: Box | None = None, pages: Pages | None = None) -> None:
        self._pages = pages
        self._tensor = tensor.detach().resolve_conj().resolve_neg()
        self.box = box or Box.whole(tuple(tensor.shape))

    def read(self, box: Box) -> memoryview:
        """See `Region.read`."""
        part = self._tensor
        for dim, (at, start, length) in enumerate(
            zip(box.offsets, self.box.offsets, box.lengths, strict=True)
        ):
            part = part.narrow(dim, at - start, length)
        dense = part.contiguous()
        copied = memoryview(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        if self._pages is not None:
            self._pages.add(part)
        return copied


@final
class Pages:
    """Pages that were read, told to the kernel now and then as not needed soon.

    So a mapped file does not fill the memory. Pages that were changed are kept by the kernel, wherever their
    tensor comes from. Where this is not possible, the kernel takes mapped pages back itself when memory is
    short. Those of a tensor that is not contiguous are left to it, since every slab of it needs most of them.
    """

    def __init__(self) -> None:
        self._used: list[tuple[int, int]] = []  # start, bytes
        self._num_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Note that a tensor has been read."""
        if _libc is None or not tensor.nbytes or not tensor.is_contiguous():
            return
        start = tensor.data_ptr() - tensor.data_ptr() % mmap.PAGESIZE
        self._used.append((start, tensor.data_ptr() + tensor.nbytes - start))
        self._num_bytes += tensor.nbytes
        if self._num_bytes < _MAX_MAPPED_BYTES:  # at once, pages of small tensors would be read many times
            return
        for first, num_bytes in self._used:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _MADV_PAGEOUT)
        self._used, self._num_bytes = [], 0
