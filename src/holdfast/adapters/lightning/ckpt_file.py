"""Files of torch.save that contain the hashes of their records: written from a checkpoint, and verified."""

from __future__ import annotations

import json
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from holdfast.adapters.lightning.home_content import HomeContent
from holdfast.checkpoint.exchange.torch_archive import DAMAGED, Record, write_records
from holdfast.checkpoint.format.names import OfCheckpoint
from holdfast.checkpoint.restore.atomic_output import atomic_file
from holdfast.errors import Corrupt
from holdfast.system.documents import Fields, decode_object
from holdfast.system.linux.files import open_regular

_HASHES = ".holdfast/hashes.json"
_PICKLE = "data.pkl"
_HEADER_BYTES, _BLOCK_BYTES, _MAX_HASHES_BYTES = 30, 1 << 20, 1 << 28


@dataclass(frozen=True, slots=True)
class FileId(OfCheckpoint):
    """Checkpoint that a file was written from, and whether training can resume from it."""

    run: str
    attempt: int
    step: int
    is_full: bool


def write_ckpt(content: HomeContent, path: Path, pickled: bytes | None = None) -> None:
    """Write a checkpoint of a home to a file that torch.load reads. It appears when it is complete.

    Args:
        content: checkpoint to write, verified as it is read.
        path: file to write or replace. Missing folders are created.
        pickled: pickle to write instead of the checkpoint's own, with the same storages.

    Raises:
        Corrupt: the checkpoint is damaged. The file was not written.
        RetryLater: the checkpoint could not be read, or the file not written.

    Memory: about 50 MiB.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, overwrite=True) as partial, partial.open("wb") as file:
        data = content.pickled() if pickled is None else pickled
        write_records(file, data, _records(content, data))


def _records(content: HomeContent, pickled: bytes) -> Iterator[Record]:
    """Yield a record per storage, then one with the hashes of all."""
    hashes = {_PICKLE: xxhash.xxh3_128_hexdigest(pickled)}
    for number, (num_bytes, read) in enumerate(content.storages()):
        name, hashed = f"data/{number}", xxhash.xxh3_128()
        yield Record(name, num_bytes, _hashing(read, hashed))
        hashes[name] = hashed.hexdigest()
    facts = {
        "run": content.run,
        "attempt": content.checkpoint_id.attempt,
        "step": content.step,
        "full": content.facts.is_full,
        "records": hashes,
    }
    yield Record.of_bytes(_HASHES, json.dumps(facts).encode())


def _hashing(
    read: Callable[[], Iterator[memoryview]], hashed: xxhash.xxh3_128
) -> Callable[[], Iterator[memoryview]]:
    def pieces() -> Iterator[memoryview]:
        for piece in read():
            hashed.update(piece)
            yield piece

    return pieces


def read_id(path: Path) -> FileId | None:
    """Return the checkpoint that a file was written from; None if Holdfast did not write all of it."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            found = _facts(archive)
            return None if found is None else _id(found[1])
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

    Returns:
        None if the file does not contain hashes: Holdfast did not write it.

    Raises:
        Corrupt: a record is damaged.
        OSError: the file could not be read.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            found = _facts(archive)
            if found is None:
                return None
            root, facts = found
            damaged = _damaged_record(file, archive, root, facts)
    except Corrupt:
        raise
    except DAMAGED as error:
        raise Corrupt(f"{path} is damaged, or not a file of torch.save: {error}.", key=str(path)) from error
    if damaged is not None:
        raise Corrupt(f"{path} is damaged: its record {damaged} does not match its hash.", key=str(path))
    return _id(facts)


def _damaged_record(file: IO[bytes], archive: zipfile.ZipFile, root: str, facts: Fields) -> str | None:
    """Return the first record whose hash is wrong; None if all are right."""
    for name, wanted in facts.fields("records").members.items():
        if _hash(file, archive.getinfo(root + name)) != wanted:
            return name
    return None


def _facts(archive: zipfile.ZipFile) -> tuple[str, Fields] | None:
    for name in archive.namelist():
        if name.endswith(f"/{_HASHES}"):
            if archive.getinfo(name).file_size > _MAX_HASHES_BYTES:
                raise Corrupt(f"{name} has more than {_MAX_HASHES_BYTES} bytes.", key=name)
            return name.removesuffix(_HASHES), decode_object(
                archive.read(name), name, max_bytes=_MAX_HASHES_BYTES
            )
    return None


def _id(facts: Fields) -> FileId:
    return FileId(
        facts.text("run", max_chars=128),
        facts.integer("attempt"),
        facts.integer("step"),
        facts.flag("full"),
    )


def _hash(file: IO[bytes], info: zipfile.ZipInfo) -> str:
    file.seek(info.header_offset)
    lengths = struct.unpack_from("<HH", file.read(_HEADER_BYTES), 26)  # of the name and of the extra field
    file.seek(sum(lengths), 1)
    hashed, left = xxhash.xxh3_128(), info.file_size
    while left and (block := file.read(min(left, _BLOCK_BYTES))):
        hashed.update(block)
        left -= len(block)
    return hashed.hexdigest()
