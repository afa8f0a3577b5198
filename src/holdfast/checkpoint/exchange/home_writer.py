"""Writers of a new home with one checkpoint: from a source in another format, or as a verified copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import xxhash

from holdfast.checkpoint.exchange.source import Source, SourceTensor
from holdfast.checkpoint.format import manifest, names, part, run, values
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.hashes import chunk_bytes_for
from holdfast.checkpoint.format.layout import FileLayout, Shard, check_name, lay_out, whole
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.home import claim
from holdfast.checkpoint.home.commit import make_manifest
from holdfast.checkpoint.home.documents import read_part
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.listing import WriterId, list_home
from holdfast.checkpoint.home.retain import delete_files
from holdfast.checkpoint.keeper.persist import verified_blocks
from holdfast.checkpoint.restore.slices import split_into_slices
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Conflict, Corrupt, HoldfastError
from holdfast.system.units import plural

BUFFER_BYTES = 8 << 20
"""Size of the buffer for tensors."""


def _hashing(parts: Iterable[memoryview], chunk_bytes: int, hashes: list[str]) -> Iterator[memoryview]:
    """Yield parts of any length, and add the hash of each chunk of them to `hashes`."""
    chunk, room = xxhash.xxh3_128(), chunk_bytes
    for view in parts:
        rest = view
        while rest:
            chunk.update(rest[:room])
            num_bytes = min(room, len(rest))
            rest, room = rest[num_bytes:], room - num_bytes
            if not room:
                hashes.append(chunk.hexdigest())
                chunk.reset()
                room = chunk_bytes
        yield view
    if room < chunk_bytes:
        hashes.append(chunk.hexdigest())


def write_home(
    store: Store, source: Source, *, step: int, origin: str, on_bytes: Callable[[int], None] | None = None
) -> DataFile:
    """Write a home with one checkpoint, as if one rank had saved it.

    `holdfast.json` is written last, so a home without it and without a manifest contains only leftovers of
    killed imports. The next import begins as a new attempt, and deletes the leftovers once its own manifest
    is written. If an import is killed after its manifest, only `holdfast.json` is missing, which the next
    start of the run writes.

    Memory: `BUFFER_BYTES`, plus one read of a region of the source.
    """
    began = time.perf_counter()
    encoded = {key: values.encode(value, key) for key, value in source.values.items()}
    for alias in source.tied:
        check_name(alias)
    shards = [tensor.shard for tensor in source]
    layout = lay_out(shards, 0)
    refuse_existing_home(store)
    this_run = claim.read_run(store) or claim.new_run()  # written last
    attempt = claim.claim_attempt(store, this_run.id, world_size=1).number
    try:
        refuse_existing_home(store)  # again, because later imports and runs see the claim
        store.sweep()
        chunk_bytes, hashes = chunk_bytes_for(layout.file_bytes), list[str]()
        parts = _hashing(_file_parts(list(source), layout, on_bytes), chunk_bytes, hashes)
        store.put_parts(names.data(step, attempt, 0), parts, layout.file_bytes, if_absent=True)
        file = DataFile(layout.file_bytes, chunk_bytes, "".join(hashes))
        facts = part.PartFacts(this_run.id, step, attempt, 0, 1, ancestors=(), values=encoded, own=())
        for name, text in _documents(facts, shards, layout, file, source.tied):
            _check_not_overtaken(store, attempt)
            store.put(name, text, if_absent=True)
        _check_not_overtaken(store, attempt)
    except BaseException:
        written = names.manifest(step, attempt), names.part(step, attempt, 0), names.data(step, attempt, 0)
        with suppress(HoldfastError):  # the error that is being raised explains more
            delete_files(store, written)  # the manifest first, so that nothing incomplete is ever visible
            store.delete(names.attempt(attempt))
        raise
    claim.note_saved(store, this_run.id, CheckpointId(attempt=attempt, step=step))
    with suppress(HoldfastError):  # the checkpoint is complete; the next start of the run writes it too
        store.put(names.RUN, run.document(this_run), if_absent=True)
    with suppress(HoldfastError):  # they do no harm, and `holdfast rm --incomplete` deletes them
        for saved in list_home(store).saved.values():
            if saved.attempt < attempt and not saved.is_committed:  # an import that no longer may commit
                delete_files(store, saved.names)
    history = History(store, WriterId(this_run.id, attempt, rank=0, world_size=1))
    detail, seconds = f"imported from {origin}", time.perf_counter() - began
    history.record("committed", step=step, num_bytes=file.num_bytes, seconds=seconds, detail=detail)
    return file


def _documents(
    facts: part.PartFacts, shards: list[Shard], layout: FileLayout, file: DataFile, tied: dict[str, str]
) -> list[tuple[str, bytes]]:
    """Return name and text of each document of a checkpoint of one rank, in the order of writing."""
    tensors = {shard.name: Tensor(shard.dtype, shard.shape, whole(0), (0,)) for shard in shards}
    name = names.part(facts.step, facts.attempt, 0)
    text = part.finish(part.draft(facts, layout.starts, catalog_text(Catalog(tensors, tied))), file)
    merged = make_manifest([part.parse(text, name)])
    return [(name, text), (names.manifest(facts.step, facts.attempt), manifest.document(merged))]


def refuse_existing_home(store: Store) -> None:
    """Raise if a home contains more than leftovers of killed imports."""
    home = list_home(store)
    is_left_over = all(
        not one.is_committed and one.attempt in home.attempts and {*one.parts, *one.data, *one.frozen} <= {0}
        for one in home.saved.values()
    )
    if is_left_over and store.size(names.RUN) is None:
        return
    count = len(home.saved)
    found = plural(count, "saved step") if count else "a run without checkpoints"
    raise Conflict(
        f"{store.url} already contains {found}. An import needs a new home, so that it is not mixed with the "
        "checkpoints of a run. Nothing was written. Choose another home, or delete this one."
    )


def _check_not_overtaken(store: Store, attempt: int) -> None:
    newest = claim.newest_attempt(store)
    if newest > attempt:
        raise Conflict(
            f"Another import or a training run has started in {store.url} during this import (attempt "
            f"{newest} after {attempt}). This import was cancelled, and what it had written was deleted."
        )


def _file_parts(
    tensors: list[SourceTensor], layout: FileLayout, on_bytes: Callable[[int], None] | None
) -> Iterator[memoryview]:
    """Yield the data file from first to last byte. Each part is valid until the next one."""
    yield memoryview(layout.header)
    buffer, filled = memoryview(bytearray(BUFFER_BYTES)), 0
    for index in sorted(range(len(tensors)), key=lambda i: layout.starts[i]):
        tensor = tensors[index]
        item_bytes = ITEM_BYTES[tensor.dtype]
        for region in split_into_slices(tensor.shape, item_bytes, BUFFER_BYTES):
            num_bytes = region.num_items * item_bytes
            if filled + num_bytes > BUFFER_BYTES:
                yield buffer[:filled]
                filled = 0
            tensor.read_into(region, buffer[filled : filled + num_bytes])
            filled += num_bytes
            if on_bytes is not None:
                on_bytes(num_bytes)
    yield buffer[:filled]


def copy_checkpoint(source: Store, target: Store, saved: Manifest) -> None:
    """Copy a checkpoint into an empty place, and verify every byte on the way, one block at a time."""
    step, attempt = saved.step, saved.attempt
    claim.check_run(target, saved.run)
    for rank in range(saved.world_size):
        found = read_part(source, saved, rank)
        files = {names.data(step, attempt, rank): found.file, names.frozen(step, attempt, rank): found.frozen}
        for name, file in files.items():
            if file is not None:
                target.put_parts(name, verified_blocks(source, name, file), file.num_bytes)
        name = names.part(step, attempt, rank)
        text = source.get(name)
        if part.parse(text, name).seal != found.seal:
            raise Corrupt(f"{name} in {source.url} has changed while it was copied.", key=name)
        target.put(name, text)
    name = names.manifest(step, attempt)
    target.put(name, source.get(name))  # last, as a save does
