"""One checkpoint as one plain safetensors file, streamed with bounded memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from holdfast.errors import Conflict, RetryLater
from holdfast.format.layout import Piece, lay_out
from holdfast.restore.boxes import runs
from holdfast.restore.parts import Parts
from holdfast.restore.read import Job, ReadStats, Want, read
from holdfast.store.contract import Store


class _FileSink:
    """Writes a piece to its tensor's place in the file."""

    def __init__(self, fd: int, base: int, piece: Piece) -> None:
        self._fd = fd
        self._base = base
        self._piece = piece

    def write(self, offset: int, view: memoryview) -> None:
        for start, at, num_bytes in runs(self._piece, offset, offset + len(view)):
            _write_all(self._fd, view[start - offset : start - offset + num_bytes], self._base + at)


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def export(
    store: Store, parts: Parts, path: Path, *, rank: int = 0, overwrite: bool = False, num_threads: int = 4
) -> ReadStats:
    """Write all tensors of a checkpoint, as `rank` sees them, into one safetensors file.

    Every key has its own bytes, tied ones too, so that any safetensors reader gives a complete state dict.
    The file appears under its name when it is whole.

    Args:
        store: the home.
        parts: the checkpoint.
        path: the file to write; its directory must exist.
        rank: whose copies of per-rank tensors are taken.
        overwrite: replace an existing file.
        num_threads: threads that read, hash and write.

    Raises:
        Conflict: the file exists.
        Corrupt: damage was found; no file was written.
        NotFound: a file of the checkpoint is missing.
        RetryLater: the store failed, or the file could not be written.

    Blocks: until the file is durable.
    """
    if path.exists() and not overwrite:
        raise Conflict(f"{path} exists; export with overwrite=True to replace it.", key=str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        return _export(store, parts, path, partial, rank, num_threads)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.errno is None:
            raise  # NotFound of the checkpoint, not of this path
        message = f"{path} could not be written: {error.strerror}. What was written of it has been removed."
        raise RetryLater(message, key=str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _export(store: Store, parts: Parts, path: Path, partial: Path, rank: int, num_threads: int) -> ReadStats:
    manifest = parts.manifest
    wholes: dict[str, Piece] = {}
    for name in [*manifest.tensors, *manifest.tied]:
        saved = parts.shape_of(manifest.tied.get(name, name), rank)
        if saved is not None:
            wholes[name] = Piece.whole(name, *saved)
    layout = lay_out(list(wholes.values()), 0)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, layout.file_bytes)
        _write_all(fd, memoryview(layout.header), 0)
        wanted: dict[tuple[int, bool], list[Want]] = {}
        for name, base in zip(wholes, layout.starts, strict=True):
            for found in parts.pieces_of(manifest.tied.get(name, name), rank):
                want = Want(found.start, found.piece.num_bytes, _FileSink(fd, base, found.piece))
                wanted.setdefault((found.rank, found.piece.frozen), []).append(want)
        jobs = [Job(parts.part(owner), wants, frozen) for (owner, frozen), wants in sorted(wanted.items())]
        stats = read(store, jobs, num_threads=num_threads)
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.replace(path)
    _sync_directory(path.parent)
    return stats


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
