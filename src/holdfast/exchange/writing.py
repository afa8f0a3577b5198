"""Writes a new home with one checkpoint: the data file piece by piece, then part and manifest."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import xxhash

from holdfast.errors import Conflict, HoldfastError
from holdfast.exchange.offer import Offer, Offered
from holdfast.format import manifest, names, part, run, values
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.hashes import chunk_bytes_for
from holdfast.format.layout import FileLayout, Piece, check_name, lay_out
from holdfast.format.part import DataFile
from holdfast.format.sealed import dumps
from holdfast.restore.find import list_home
from holdfast.restore.slabs import cut_in_slabs
from holdfast.store.contract import Store

ROOM_BYTES = 8 << 20
"""Bytes of tensors in memory at once."""
_ATTEMPT = 1


class ChunkHashes:
    """The chunk hashes of a file whose bytes come in parts of any length.

    Args:
        file_bytes: length of the file.
    """

    def __init__(self, file_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes_for(file_bytes)
        self._file_bytes = file_bytes
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()
        self._filled = 0

    def add(self, view: memoryview) -> None:
        """Take the next bytes."""
        while view:
            head = view[: self.chunk_bytes - self._filled]
            self._open.update(head)
            self._filled += len(head)
            view = view[len(head) :]
            if self._filled == self.chunk_bytes:
                self._close()

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open.reset()
        self._filled = 0

    def finish(self) -> DataFile:
        """Size and hashes, after the last byte."""
        if self._filled:
            self._close()
        return DataFile(self._file_bytes, self.chunk_bytes, tuple(self._done))


def write_home(
    store: Store, offered: Offered, *, step: int, origin: str, on_bytes: Callable[[int], None] | None = None
) -> DataFile:
    """Make a home that holds one checkpoint, as a first attempt of one rank would have saved it.

    Memory: `ROOM_BYTES`, and what the regions of the source need for one read.

    Args:
        store: a home that is new.
        offered: what is written.
        step: step of the checkpoint.
        origin: where it comes from, for the history.
        on_bytes: called with the bytes of tensors when they have been taken from the source.

    Returns:
        Facts of the data file.

    Raises:
        Conflict: the home is not new; it is as it was.
        InvalidInput: a name or a value that no checkpoint can hold; nothing was written.
        Corrupt: the source is damaged; what had been written was removed.
        RetryLater: source or home failed; what had been written was removed, if that was possible.

    Blocks: until the checkpoint is durable.
    """
    began = time.perf_counter()
    encoded = {key: values.encode(value, key) for key, value in offered.values.items()}
    for alias in offered.tied:
        check_name(alias)
    pieces = [offer.piece for offer in offered]
    layout = lay_out(pieces, 0)
    refuse_used(store)
    run_id = uuid.uuid4().hex
    store.put(names.RUN, run.document(run.Run(run_id, time.time())), if_absent=True)
    try:
        claim = run.Attempt(_ATTEMPT, run_id, 1, socket.gethostname(), os.getpid(), time.time())
        store.put(names.attempt(_ATTEMPT), run.document(claim), if_absent=True)
        hashes = ChunkHashes(layout.file_bytes)
        parts = _hashed(_file_parts(list(offered), layout, on_bytes), hashes)
        store.put_parts(names.data(step, _ATTEMPT, 0), parts, layout.file_bytes, if_absent=True)
        file = hashes.finish()
        texts = documents(
            run_id=run_id,
            step=step,
            pieces=pieces,
            layout=layout,
            file=file,
            tied=offered.tied,
            values=encoded,
        )
        for name, text in texts.items():
            store.put(name, text, if_absent=True)
    except BaseException:
        _remove(store, step)
        raise
    _tell(store, step, file.num_bytes, time.perf_counter() - began, origin)
    return file


def documents(
    *,
    run_id: str,
    step: int,
    pieces: list[Piece],
    layout: FileLayout,
    file: DataFile,
    tied: dict[str, str],
    values: dict[str, Any],
) -> dict[str, bytes]:
    """The part and the manifest of a checkpoint of one rank, by name, in the order in which they are put.

    Args:
        run_id: the run.
        step: the step.
        pieces: what is in the data file.
        layout: where in it.
        file: its size and hashes.
        tied: alias -> name.
        values: tagged JSON by top-level key.
    """
    draft = part.draft(
        run=run_id,
        step=step,
        attempt=_ATTEMPT,
        rank=0,
        world_size=1,
        base_step=None,
        pieces=part.pieces_text(pieces, layout.starts),
        tied=tied,
        values=values,
    )
    name = names.part(step, _ATTEMPT, 0)
    text = part.finish(draft, file)
    merged = manifest.merge([(part.parse(text, name), text)], id=uuid.uuid4().hex, created_unix_s=time.time())
    return {name: text, names.manifest(step, _ATTEMPT): manifest.document(merged)}


def refuse_used(store: Store) -> None:
    """Refuse a home that is not new.

    Raises:
        Conflict: it holds a run, or something of one.
        RetryLater: the store failed.
    """
    home = list_home(store)
    if store.size(names.RUN) is None and not home.attempts and not home.saved:
        return
    held = f"{len(home.saved)} saved steps" if home.saved else "a run without checkpoints"
    raise Conflict(
        f"{store.url} holds {held} already; an import makes a home of its own, so that no run's line of "
        "checkpoints is mixed with another's. Nothing was written. Give a new place, or delete this one."
    )


def _hashed(parts: Iterator[memoryview], hashes: ChunkHashes) -> Iterator[memoryview]:
    for one in parts:
        hashes.add(one)
        yield one


def _file_parts(
    offers: list[Offer], layout: FileLayout, on_bytes: Callable[[int], None] | None
) -> Iterator[memoryview]:
    """The data file from its first byte to its last; each part is valid until the next one."""
    yield memoryview(layout.header)
    room, filled = memoryview(bytearray(ROOM_BYTES)), 0
    for index in sorted(range(len(offers)), key=lambda i: layout.starts[i]):
        offer = offers[index]
        item_bytes = ITEM_BYTES[offer.dtype]
        for slab in cut_in_slabs(offer.shape, item_bytes, ROOM_BYTES):
            num_bytes = slab.num_items * item_bytes
            if filled + num_bytes > ROOM_BYTES:
                yield room[:filled]
                filled = 0
            offer.read_into(slab, room[filled : filled + num_bytes])
            filled += num_bytes
            if on_bytes is not None:
                on_bytes(num_bytes)
    yield room[:filled]


def _remove(store: Store, step: int) -> None:
    """Take back what was written: the manifest first, so that nothing incomplete is ever visible."""
    written = (
        names.manifest(step, _ATTEMPT),
        names.part(step, _ATTEMPT, 0),
        names.data(step, _ATTEMPT, 0),
        names.attempt(_ATTEMPT),
        names.RUN,
    )
    for name in written:
        with suppress(HoldfastError):  # what brought us here says more
            store.delete(name)


def _tell(store: Store, step: int, num_bytes: int, seconds: float, origin: str) -> None:
    line = {
        "t": round(time.time(), 6),
        "event": "committed",
        "step": step,
        "attempt": _ATTEMPT,
        "rank": 0,
        "bytes": num_bytes,
        "seconds": round(seconds, 6),
        "detail": f"imported from {origin}",
    }
    with suppress(HoldfastError):  # the checkpoint stands; a line less of history does not change that
        store.append(names.history(_ATTEMPT, 0), dumps(line) + b"\n")
