"""Lightning's checkpoints: as a pickle with storages, in a home, as files with hashes, and their places."""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import xxhash
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from msgspec import Meta, Struct

from holdfast.adapters.kit.run import open_loaded
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.torch_archive import DAMAGED, Record, write_records
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.limits import MAX_NAME_CHARS
from holdfast.checkpoint.format.names import OfCheckpoint
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.checkpoint.state.tensors import is_savable
from holdfast.checkpoint.store.address import SCHEMES
from holdfast.errors import Corrupt, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.documents import Count, decode_as, read_as, to_plain
from holdfast.system.linux.files import open_regular
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.system.rawbytes import view_bytes

_PROTOCOL = 2
"""Protocol of the pickles of torch.save, which torch.load expects."""
_SMALL_BYTES = 16 << 10
"""Storages of at most so many bytes are compared by their content."""


class Pickled(Struct, frozen=True):
    """Dictionary as torch.save stores it: a pickle, and the storages in the order of their keys.

    The storages are those of the live tensors, which training changes. Each has the name of its first tensor
    in the dictionary, such as "state_dict.layer.weight".
    """

    data: bytes
    storages: dict[str, torch.Tensor]

    def marks(self) -> tuple[object, ...]:
        """Return a mark per storage. It changes with each write by torch."""
        return tuple(map(_mark, self.storages.values()))


def _mark(tensor: torch.Tensor) -> object:
    if tensor.is_inference() or tensor.is_meta:
        return object()  # equal to nothing, since torch does not count its writes
    if tensor.nbytes <= _SMALL_BYTES and tensor.device.type == "cpu":
        return bytes(view_bytes(tensor)), tensor.dtype, tensor.shape  # made anew for each save, as a rule
    return tensor.data_ptr(), tensor.nbytes, tensor._version


def pickle_content(content: Mapping[str, Any]) -> Pickled:
    """Pickle a checkpoint dictionary as torch.save does, without the bytes of its tensors."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(content)
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in _tensors(content, ""):
        first.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
    storages: dict[str, torch.Tensor] = {}
    for address, (key, storage) in pickler.storages.items():
        name, tensor = first.get(address, (f"objects.{key}", None))
        if name in storages or not 0 < len(name) <= MAX_NAME_CHARS // 2 or "@" in name:
            name = f"storages.{key}"
        while name in storages:  # a user's own key may have such a name
            name += "_"
        storages[name] = _whole(storage, tensor)
    return Pickled(out.getvalue(), storages)


def _whole(storage: torch.UntypedStorage, tensor: torch.Tensor | None) -> torch.Tensor:
    """Return all memory of a storage: a tensor of it that covers it, else its bytes."""
    if tensor is not None and tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
        return tensor.detach()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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


class _Pickler(pickle.Pickler):
    """Pickler that refers to storages by keys, in the format of torch.save."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=_PROTOCOL)
        self.storages: dict[int, tuple[str, torch.UntypedStorage]] = {}  # key and storage, by identity
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: Any, /) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, count = obj._untyped_storage, obj.dtype, obj._size()
            kind = getattr(torch, obj._pickle_storage_type())
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, count, kind = obj, torch.uint8, obj.nbytes(), torch.UntypedStorage
        else:
            return None
        address = storage.data_ptr() if storage.device.type != "meta" else 0
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                f"Two tensors in the checkpoint view the same memory as {self._dtypes[address]} and {dtype}, "
                "which a file of torch.save cannot hold. Nothing was saved. Clone one of them."
            )
        key, _ = self.storages.setdefault(storage._cdata, (str(len(self.storages)), storage))
        return ("storage", kind, key, torch.serialization.location_tag(storage), count)


_TENSORS, _FACTS, _PICKLED = "checkpoint", "lightning", "pickle"
_FORMAT = 1
_NUM_THREADS = 2
FilePath = Annotated[str, Meta(max_length=1 << 16, pattern=r"\A[^\0\ud800-\udfff]*\Z")]


class Facts(Struct, frozen=True):
    """Facts about one save of Lightning."""

    path: FilePath  # of its file, relative to the folder of the home if it is in there
    global_step: Count | None  # count of optimizer steps; None for other dictionaries, as Fabric's
    epoch: Count | None
    is_full: bool  # training can resume from it; False with `save_weights_only`


class _SavedFacts(Facts, frozen=True):
    names: tuple[str, ...]  # of the tensors, in the order of their storages' keys


def make_state(pickled: Pickled, facts: Facts) -> dict[str, Any]:
    """Return the state that the Checkpointer saves: tensors by name, the pickle, and facts."""
    return {
        _TENSORS: pickled.storages,
        _FACTS: {
            "format": _FORMAT,
            "names": list(pickled.storages),
            _PICKLED: torch.frombuffer(bytearray(pickled.data), dtype=torch.uint8),
            **to_plain(facts),
        },
    }


class HomeContent:
    """One of Lightning's checkpoints in a home, opened for reading. Every byte is verified.

    With its attempt, it may lack its manifest: its keeper was killed before it was written.
    """

    def __init__(self, home: str, step: int, attempt: int | None = None) -> None:
        self._checkpoint = checkpoint = open_loaded(home, step, attempt)
        self.run, self.step = checkpoint.run, checkpoint.step
        self.checkpoint_id = checkpoint.manifest.checkpoint_id
        values = checkpoint.values().get(_FACTS)
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise Unsupported(
                f"{checkpoint!r} was not saved through Lightning, or by a newer version of Holdfast. It was "
                "left alone. Use another home for this training, or upgrade.",
                step=checkpoint.step,
            )
        what = f"Lightning's part of {checkpoint!r}"
        self.facts = facts = read_as(_SavedFacts, values, what)
        self._names = [f"{_TENSORS}.{name}" for name in facts.names]
        for name in (*self._names, f"{_FACTS}.{_PICKLED}"):
            if name not in checkpoint:
                raise Corrupt(f"{what} lacks the tensor {name!r}.", key=what)

    def pickled(self) -> bytes:
        """Return the pickle, which refers to the storages. It is not loaded here."""
        return self._checkpoint[f"{_FACTS}.{_PICKLED}"].numpy().tobytes()

    def storages(self) -> Iterator[tuple[int, Callable[[], Iterator[memoryview]]]]:
        """Yield the size and the reader of each storage, in the order of their keys.

        Each is read before the next one is asked for.
        """
        selection = ExportSelection(self._checkpoint, num_threads=_NUM_THREADS)
        read = selection.stream(self._names)
        for name in self._names:
            num_bytes = selection.tensors[name].num_bytes
            yield num_bytes, partial(read, num_bytes)


_HASHES = ".holdfast/hashes.json"
_PICKLE = "data.pkl"
_HEADER_BYTES, _BLOCK_BYTES, _MAX_HASHES_BYTES = 30, 1 << 20, 1 << 28


class FileId(OfCheckpoint, Struct, frozen=True, rename={"is_full": "full", "hashes": "records"}):
    """Checkpoint that a file was written from, whether training can resume from it, and its hashes."""

    run: Annotated[str, Meta(max_length=128)]
    attempt: Count
    step: Count
    is_full: bool
    hashes: dict[str, str]  # of the archive's records by name


def write_ckpt(content: HomeContent, path: Path, pickled: bytes | None = None) -> None:
    """Write a checkpoint of a home to a file that torch.load reads. It appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, overwrite=True) as partial, partial.open("wb") as file:
        data = content.pickled() if pickled is None else pickled
        write_records(file, data, _records(content, data))


def _records(content: HomeContent, pickled: bytes) -> Iterator[Record]:
    """Yield a record per storage, then one with the hashes of all."""
    hashes = {_PICKLE: xxhash.xxh3_128_hexdigest(pickled)}
    for number, (num_bytes, read) in enumerate(content.storages()):
        name, hashed = f"data/{number}", xxhash.xxh3_128()
        yield Record(name, num_bytes, partial(_hash_pieces, read, hashed))
        hashes[name] = hashed.hexdigest()
    attempt = content.checkpoint_id.attempt
    file_id = FileId(content.run, attempt, content.step, content.facts.is_full, hashes)
    yield Record.of_bytes(_HASHES, json.dumps(to_plain(file_id)).encode())


def _hash_pieces(read: Callable[[], Iterator[memoryview]], hashed: xxhash.xxh3_128) -> Iterator[memoryview]:
    for piece in read():
        hashed.update(piece)
        yield piece


def read_id(path: Path) -> FileId | None:
    """Return the checkpoint that a file was written from; None if Holdfast did not write all of it."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return _read_hashes(archive)[1]
    except (OSError, Corrupt, *DAMAGED):
        return None


def may_replace(path: Path) -> bool:
    """Return True if a path is free or has a checkpoint."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    except OSError:
        return False
    is_file = stat.S_ISREG(mode) or stat.S_ISLNK(mode)  # a link is replaced, not the file that it names
    return is_file and (path.suffix == ".ckpt" or read_id(path) is not None)


def verify_ckpt(path: Path) -> FileId | None:
    """Hash all records of a file, and return the checkpoint that it was written from.

    Without hashes that is None: Holdfast did not write it.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            root, found = _read_hashes(archive)
            hashes = {} if found is None else found.hashes
            damaged = next(
                (name for name in hashes if _hash(file, archive.getinfo(root + name)) != hashes[name]), None
            )
    except Corrupt:
        raise
    except DAMAGED as error:
        raise Corrupt(f"{path} is damaged, or not a file of torch.save: {error}.", key=str(path)) from error
    if damaged is not None:
        raise Corrupt(f"{path} is damaged: its record {damaged} does not match its hash.", key=str(path))
    return found


def _read_hashes(archive: zipfile.ZipFile) -> tuple[str, FileId | None]:
    """Return the folder of all records, and the content of the one with their hashes, if it has one."""
    name = next((name for name in archive.namelist() if name.endswith(f"/{_HASHES}")), None)
    if name is None:
        return "", None
    if archive.getinfo(name).file_size > _MAX_HASHES_BYTES:
        raise Corrupt(f"{name} has more than {_MAX_HASHES_BYTES} bytes.", key=name)
    text = archive.read(name)
    return name.removesuffix(_HASHES), decode_as(FileId, text, name, max_bytes=_MAX_HASHES_BYTES)


def _hash(file: IO[bytes], info: zipfile.ZipInfo) -> str:
    file.seek(info.header_offset)
    lengths = struct.unpack_from("<HH", file.read(_HEADER_BYTES), 26)  # of the name and of the extra field
    file.seek(sum(lengths), 1)
    hashed, left = xxhash.xxh3_128(), info.file_size
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        hashed.update(block)
        left -= len(block)
    return hashed.hexdigest()


_SUFFIX = ".holdfast"


def is_local(path: str) -> bool:
    """Return True for a path, or a URL of this machine's file system."""
    return get_protocol(path) in ("file", "local")


def absolute(path: str | os.PathLike[str]) -> str:
    """Return an absolute path without a protocol, or a URL as it is."""
    text = os.fspath(path)
    if not is_local(text):
        return text
    return str(Path(text.removeprefix("file://").removeprefix("local://")).absolute())


def folder_of(path: str) -> str:
    """Return the folder of an absolute path or URL."""
    return path.rpartition("/")[0]


def is_inside(path: str, folder: Path) -> bool:
    """Return True if a path is below a folder once links are resolved."""
    try:
        return is_local(path) and Path(path).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links, or a name that is too long
        return False


def home_beside(folder: str | os.PathLike[str]) -> str:
    """Return the default home of the checkpoints in a folder: its name with ".holdfast", beside it.

    For a file system that cannot hold a home, it is a folder of this user on this machine.
    """
    place = absolute(folder).rstrip("/")
    if is_local(place) or get_protocol(place) in SCHEMES:
        return f"{place}{_SUFFIX}"
    parent = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute()
    home = parent / "holdfast" / "lightning" / f"{digest(place.encode())}{_SUFFIX}"
    warn(
        f"{place} is on a file system that cannot hold a home, which every save needs first. It is {home} on "
        'this machine: another one cannot continue an interrupted save. Choose one with home="...".',
        UserWarning,
    )
    return str(home)


class HomePlace(Struct, frozen=True):
    """Home of a run, and its files."""

    home: str
    storage_options: Mapping[str, Any] = {}

    @property
    def folder(self) -> str:
        """Folder that contains the home, with a slash at its end."""
        return folder_of(self.home).rstrip("/") + "/"

    def relative(self, path: str) -> str:
        """Return a path relative to the home's folder, if it is in there."""
        return path.removeprefix(self.folder)

    def absolute(self, path: str) -> str:
        """Return the path that `relative` was called with."""
        return path if path.startswith("/") or "://" in path else self.folder + path

    def exists(self, path: str) -> bool:
        """Return True if a file exists."""
        if is_local(path):
            return Path(path).is_file()
        fs, name = url_to_fs(path, **self.storage_options)
        return bool(fs.isfile(name))

    def write(self, path: str, write: Callable[[Path], None]) -> None:
        """Write a file, which appears when it is complete."""
        if is_local(path):
            write(Path(path))
            return
        fs, name = url_to_fs(path, **self.storage_options)
        with temporary_folder("lightning") as folder:
            local = Path(folder) / "file.ckpt"
            write(local)
            fs.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH120 - a URL is not a path
            fs.put_file(str(local), name)
