"""Writes a new home with one checkpoint: the data file piece by piece, then part and manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import xxhash

from holdfast.errors import Conflict, HoldfastError
from holdfast.exchange.offer import Offer, Offered
from holdfast.format import cuts, manifest, names, part, run, values
from holdfast.format.catalog import Catalog, Tensor, catalog_text
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.hashes import chunk_bytes_for
from holdfast.format.layout import FileLayout, Piece, check_name, lay_out
from holdfast.format.part import DataFile
from holdfast.home.attempts import newest_attempt, note_saved
from holdfast.home.claim import claim_attempt, new_run
from holdfast.home.commit import make_manifest, parse_parts
from holdfast.home.deletion import delete_files
from holdfast.home.documents import read_run
from holdfast.home.history import History
from holdfast.home.listing import list_home
from holdfast.home.writer import WriterId
from holdfast.restore.slabs import cut_in_slabs
from holdfast.store.contract import Store

ROOM_BYTES = 8 << 20
"""Bytes of tensors in memory at once."""


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
        return DataFile(self._file_bytes, self.chunk_bytes, "".join(self._done))


def write_home(
    store: Store, offered: Offered, *, step: int, origin: str, on_bytes: Callable[[int], None] | None = None
) -> DataFile:
    """Make a home that holds one checkpoint, as an attempt of one rank would have saved it.

    `holdfast.json` comes last. So a home without it and without a manifest holds no more than what killed
    imports left: the next one begins as a new attempt beside that, and removes it when its own manifest
    stands. A killed import whose manifest stands is complete but for `holdfast.json`, which the next start
    of the run makes.

    Memory: `ROOM_BYTES`, and what the regions of the source need for one read.

    Args:
        store: a home that is new, or in which imports were killed.
        offered: what is written.
        step: step of the checkpoint.
        origin: where it comes from, for the history.
        on_bytes: called with the bytes of tensors when they have been taken from the source.

    Returns:
        Facts of the data file.

    Raises:
        Conflict: the home is not new, or something else has begun in it meanwhile; it is as if this call had
            not been.
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
    this_run = read_run(store) or new_run()  # written last
    attempt = claim_attempt(store, this_run.id, world_size=1).number
    try:
        refuse_used(store)  # again: from the claim on, whoever comes later sees it
        store.sweep()
        hashes = ChunkHashes(layout.file_bytes)
        parts = _hashed(_file_parts(list(offered), layout, on_bytes), hashes)
        store.put_parts(names.data(step, attempt, 0), parts, layout.file_bytes, if_absent=True)
        file = hashes.finish()
        texts = documents(
            run_id=this_run.id,
            step=step,
            attempt=attempt,
            pieces=pieces,
            layout=layout,
            file=file,
            tied=offered.tied,
            values=encoded,
        )
        for name, text in texts.items():
            _check_not_overtaken(store, attempt)
            store.put(name, text, if_absent=True)
        _check_not_overtaken(store, attempt)
    except BaseException:
        _remove(store, step, attempt)
        raise
    note_saved(store, this_run.id, attempt, step)
    with suppress(HoldfastError):  # the checkpoint stands; the next start of the run makes the document too
        store.put(names.RUN, run.document(this_run), if_absent=True)
    _remove_older(store, attempt)
    history = History(store, WriterId(this_run.id, attempt, rank=0, world_size=1))
    detail, seconds = f"imported from {origin}", time.perf_counter() - began
    history.record("committed", step=step, num_bytes=file.num_bytes, seconds=seconds, detail=detail)
    return file


def documents(
    *,
    run_id: str,
    step: int,
    attempt: int,
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
        attempt: the attempt that writes it.
        pieces: what is in the data file.
        layout: where in it.
        file: its size and hashes.
        tied: alias -> name.
        values: tagged JSON by top-level key.
    """
    whole, ranks = cuts.whole(0), (0,)
    tensors = {piece.name: Tensor(piece.dtype, piece.shape, whole, ranks) for piece in pieces}
    draft = part.draft(
        run=run_id,
        step=step,
        attempt=attempt,
        rank=0,
        world_size=1,
        ancestors=(),
        values=values,
        own=(),
        starts=layout.starts,
        catalog=catalog_text(Catalog(tensors, tied)),
    )
    name = names.part(step, attempt, 0)
    text = part.finish(draft, file)
    merged = make_manifest(parse_parts([(name, text)]))
    return {name: text, names.manifest(step, attempt): manifest.document(merged)}


def refuse_used(store: Store) -> None:
    """Refuse a home that holds more than what killed imports left.

    Raises:
        Conflict: it holds a run, or something of one.
        RetryLater: the store failed.
    """
    home = list_home(store)
    is_left_over = all(
        not one.is_committed and one.attempt in home.attempts and {*one.parts, *one.data, *one.frozen} <= {0}
        for one in home.saved.values()
    )
    if is_left_over and store.size(names.RUN) is None:
        return
    count = len(home.saved)
    held = f"{count} saved step{'s' * (count > 1)}" if count else "a run without checkpoints"
    raise Conflict(
        f"{store.url} holds {held} already; an import makes a home of its own, so that no run's line of "
        "checkpoints is mixed with another's. Nothing was written. Give a new place, or delete this one."
    )


def _check_not_overtaken(store: Store, attempt: int) -> None:
    newest = newest_attempt(store)
    if newest > attempt:
        message = (
            f"Another import or a training has begun in {store.url} since this import did (attempt {newest} "
            f"after {attempt}), and goes on. This import was given up, and what it had written was removed."
        )
        raise Conflict(message)


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


def _remove(store: Store, step: int, attempt: int) -> None:
    """Take back what was written: the manifest first, so that nothing incomplete is ever visible."""
    written = names.manifest(step, attempt), names.part(step, attempt, 0), names.data(step, attempt, 0)
    with suppress(HoldfastError):  # the error that is being raised explains more
        delete_files(store, written)
        store.delete(names.attempt(attempt))


def _remove_older(store: Store, attempt: int) -> None:
    """Remove the files of imports before this one, which did not come to their manifest and no longer may."""
    with suppress(HoldfastError):  # they are in nobody's way, and `holdfast rm --incomplete` finds them
        for one in list_home(store).saved.values():
            if one.attempt < attempt and not one.is_committed:
                delete_files(store, one.names)
