"""Documents of a home: run, manifests and parts, each checked against its name and the files beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import astuple

from holdfast.checkpoint.format import manifest as manifest_format
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as part_format
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.hashes import MAX_CHUNK_BYTES
from holdfast.checkpoint.format.layout import BLOCK_BYTES
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.home.listing import ListedSave, Listing, list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.tiered import first_good
from holdfast.errors import Corrupt, Denied, NotFound, RetryLater
from holdfast.system.documents import shown


def read_manifest(store: Store, checkpoint: CheckpointId, run_id: str | None) -> Manifest:
    """Return the manifest of a checkpoint, checked against its name and, unless `run_id` is None, its run."""
    return first_good(store, lambda copy: _read_manifest(copy, checkpoint, run_id))


def _read_manifest(store: Store, checkpoint: CheckpointId, run_id: str | None) -> Manifest:
    name = names.manifest(checkpoint.step, checkpoint.attempt)
    found = manifest_format.parse(store.get(name), name)
    if found.checkpoint_id != checkpoint:
        message = f"{name} is the manifest of step {found.step}, attempt {found.attempt}, under a wrong name."
        raise Corrupt(message, step=checkpoint.step, key=name)
    if run_id is not None and found.run != run_id:
        message = f"{name} belongs to another run: expected run {run_id}, found {found.run}."
        raise Corrupt(message, step=checkpoint.step, key=name)
    left = found.data_bytes
    for key, tensor in found.tensors.items():
        if tensor.partitioning is not None:
            left -= math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if left < 0:
            message = f"{name} names tensors that need more than the {found.data_bytes} bytes of its files."
            raise Corrupt(message, step=checkpoint.step, key=key)
    return found


def expected_sizes(manifest: Manifest) -> dict[int, dict[str, int]]:
    """Return the bytes of each file that a manifest names, by rank and name."""
    key, sizes = (manifest.step, manifest.attempt), dict[int, dict[str, int]]()
    for file in manifest.parts:
        rank = file.rank
        sizes[rank] = {names.part(*key, rank): file.part_bytes, names.data(*key, rank): file.data_bytes}
        if file.frozen_bytes is not None:
            sizes[rank][names.frozen(*key, rank)] = file.frozen_bytes
    return sizes


def check_files(listings: Sequence[Listing], manifest: Manifest) -> None:
    """Check that some copy of every file of a checkpoint, in listings of the tiers, has the right size."""
    unlisted = ListedSave(step=manifest.step, attempt=manifest.attempt)
    copies = [listing.saved.get(manifest.checkpoint_id, unlisted).sizes for listing in listings]
    for rank, sizes in expected_sizes(manifest).items():
        for name, expected in sizes.items():
            errors = [
                size_error(name, expected, copy.get(name), step=manifest.step, rank=rank) for copy in copies
            ]
            if None not in errors:  # the nearest one that is not merely missing
                wrong = [error for error in errors if isinstance(error, Corrupt)]
                raise (wrong or [error for error in errors if error])[0]


def check_listed(store: Store, manifest: Manifest, *, besides: Sequence[Listing] = ()) -> None:
    """Check that a home, in its copies, or listings of nearer places have every file, with the right size."""
    listings, unread = list(besides), []
    for copy in store.copies():
        try:
            listings.append(list_home(copy, step=manifest.step))
        except (Denied, RetryLater) as error:
            unread.append(error)
    if not listings:
        raise unread[0]
    try:
        check_files(listings, manifest)
    except (Corrupt, NotFound):
        if unread:
            raise unread[0] from None
        raise


def size_error(
    name: str, expected: int, found: int | None, *, step: int, rank: int
) -> NotFound | Corrupt | None:
    """Return the error for a file of the wrong size, or None. `found` is None for a missing file."""
    if found is None:
        return NotFound(f"{name} is missing: expected {expected} bytes.", step=step, rank=rank, key=name)
    if found == expected:
        return None
    how = "truncated" if found < expected else "too long"
    message = f"{name} is {how}: expected {expected} bytes, found {found}."
    return Corrupt(message, step=step, rank=rank, key=name)


def read_part(store: Store, manifest: Manifest, rank: int) -> Part:
    """Return a rank's part, checked to be the one that was committed."""
    return first_good(store, lambda copy: _read_part(copy, manifest, rank))


def _read_part(store: Store, manifest: Manifest, rank: int) -> Part:
    name = names.part(manifest.step, manifest.attempt, rank)
    expected, part = astuple(manifest.parts[rank])[1:5], part_format.parse(store.get(name), name)
    if part.listed != expected:
        message = (
            f"{name} is not the part that was committed: expected {expected[0]} bytes with seal "
            f"{expected[1]}, found {part.listed[0]} bytes with seal {part.listed[1]}."
        )
        raise Corrupt(message, step=manifest.step, rank=rank, key=name)
    check_part(part, rank, name)
    return part


def check_part(part: Part, rank: int, name: str) -> None:
    """Check a part: its rank, its chunk size, and that its shards are inside its file.

    A part that another program wrote may be sealed and still ask for reads outside its file, or for buffers
    without limit.
    """
    if part.rank != rank:
        raise Corrupt(f"{name} is the part of rank {part.rank}.", step=part.step, rank=rank, key=name)
    for file in part.files.values():
        if not 0 < file.chunk_bytes <= MAX_CHUNK_BYTES or file.chunk_bytes % BLOCK_BYTES:
            message = (
                f"{name} has chunks of {file.chunk_bytes} bytes: expected a multiple of 4 KiB up to 8 MiB."
            )
            raise Corrupt(message, step=part.step, rank=rank, key=name)
    sizes = {False: part.file.num_bytes, True: part.frozen.num_bytes if part.frozen else -1}
    left = dict(sizes)  # bytes that no shard has: shared ones would let a small file ask for any memory
    for shard, start in zip(part.shards, part.starts, strict=True):
        is_inside = (
            shard.region.is_inside(shard.shape) and 0 <= start <= sizes[shard.frozen] - shard.num_bytes
        )
        left[shard.frozen] -= shard.num_bytes if is_inside else 0
        if not is_inside or (left[shard.frozen] < 0 and shard.num_bytes):
            where = f"{list(shard.sizes)} at {list(shard.offsets)} of {shard.dtype}{list(shard.shape)}"
            message = f"{name} places {shown(shard.name)} at byte {start} as {where}, which cannot be."
            raise Corrupt(message, step=part.step, rank=rank, key=shard.name)


def read_draft(store: Store, saved: ListedSave, rank: int) -> Part:
    """Return a rank's part of a save, which may be uncommitted, checked against its files."""
    name = names.part(saved.step, saved.attempt, rank)
    part = part_format.parse(store.get(name), name)
    check_part(part, rank, name)
    frozen_bytes = part.frozen.num_bytes if part.frozen else saved.frozen.get(rank)
    found = saved.step, saved.attempt, saved.data[rank], saved.frozen.get(rank)
    if (part.step, part.attempt, part.file.num_bytes, frozen_bytes) != found:
        message = f"{name} does not describe the data file beside it."
        raise Corrupt(message, step=saved.step, rank=rank, key=name)
    return part
