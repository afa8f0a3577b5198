"""Commit of a save once every part exists, unless its attempt is fenced; also by the next attempt."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec.structs import replace

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Part, parse_without_catalog
from holdfast.checkpoint.format.part import parse as parse_part
from holdfast.checkpoint.format.run import Refusal, document, parse
from holdfast.checkpoint.home.claim import check_claim, check_not_fenced, note_saved
from holdfast.checkpoint.home.documents import read_draft
from holdfast.checkpoint.home.judges import Judges, PartSections, default_judges
from holdfast.checkpoint.home.listing import ListedSave, WriterId, candidates, list_home, part_sizes, scan
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.system.failpoint import failpoint

_NUM_READS = 8  # parts that a commit reads at once, where each read waits for a network
MAX_REFUSALS = 100
"""Refusals of the newest attempt that stay, until the next attempt deletes them."""


def make_manifest(
    parts: Iterable[Part],
    *,
    id: str | None = None,
    created_unix_s: float | None = None,
    judges: Judges | None = None,
) -> Manifest:
    """Return the manifest of a checkpoint from the parts of all its ranks.

    Args:
        parts: those of all ranks, in the order of ranks.
        judges: of the attempt that saved; by default those of the default watches, without a memory.
    """
    found = PartSections()
    manifest = manifests.merge(
        map(found.add, parts),
        id=uuid.uuid4().hex if id is None else id,
        created_unix_s=time.time() if created_unix_s is None else created_unix_s,
    )
    if not found.by_watch:  # imported, or of a run without watches
        return manifest
    return replace(manifest, watches=(judges or default_judges()).sections(found))


class _PartReader:
    """A reader of the parts of a save, which reads a catalog once, not with the part of each rank."""

    def __init__(self, store: Store) -> None:
        self._store, self._catalogs, self._newest = store, dict[str, bytes](), b""

    def read_all(self, listed: Sequence[tuple[str, int]]) -> Iterator[Part]:
        """Yield the parts of these names and sizes, up to `_NUM_READS` at once from a store elsewhere."""
        with ThreadPoolExecutor(_NUM_READS, "holdfast-parts") as pool:
            # Threads cost more than a quick read.
            fetch = pool.map if self._store.properties.survives_host else map
            for first in range(0, len(listed), _NUM_READS):
                yield from fetch(self._read, listed[first : first + _NUM_READS])

    def _read(self, entry: tuple[str, int]) -> Part:
        name, rest = entry[0], entry[1] - len(self._newest) - 1
        if self._newest and rest > 0:
            with suppress(Corrupt):  # it has another catalog, or is damaged, which the whole document shows
                text = bytes(self._store.read_view(name, 0, rest))
                return parse_without_catalog(text, name, self._catalogs)
        part = parse_part(self._store.get(name), name)
        self._newest = self._catalogs[part.catalog_digest] = part.catalog_text
        return part


def commit(
    store: Store, writer: WriterId, step: int, *, claim: str = "", judges: Judges | None = None
) -> Manifest:
    """Write the manifest of `step` durably after every rank has written its part. Only rank 0 calls this.

    Args:
        claim: the document by which the attempt was claimed; "" leaves out the check that it still exists.
    """
    name = names.manifest(step, writer.attempt)
    # A fenced attempt does not commit. `publish` checks again after the write, so of two attempts at most one
    # leaves a manifest that the other does not expect (note 014).
    check_not_fenced(store, writer.attempt)
    check_claim(store, writer.attempt, claim)
    checkpoint = CheckpointId(attempt=writer.attempt, step=step)
    manifest = merge_parts(store, writer, checkpoint, writer.world_size, judges=judges)
    publish(store, writer, step, name, manifests.document(manifest))
    return manifest


def merge_parts(
    store: Store, writer: WriterId, checkpoint: CheckpointId, world_size: int, *, judges: Judges | None = None
) -> Manifest:
    """Return the manifest of a checkpoint whose parts all exist. Only rank 0 calls this.

    If the parts of the writer's own attempt do not fit together, it refuses the save for all ranks.
    """
    step, attempt = checkpoint.step, checkpoint.attempt
    sizes = part_sizes(store, step, attempt)
    listed = [(names.part(step, attempt, rank), sizes.get(rank, 0)) for rank in range(world_size)]
    try:
        return make_manifest(_PartReader(store).read_all(listed), judges=judges)
    except InvalidInput as error:
        if attempt == writer.attempt and world_size > 1:
            refuse(store, writer, step, error)
        raise


def publish(store: Store, writer: WriterId, step: int, name: str, text: bytes) -> None:
    """Make a checkpoint visible, durably, whose files all exist. Raise if this attempt is fenced by now.

    Only rank 0 of an attempt calls this.
    """
    if not put_manifest(store, step, name, text):
        # An earlier keeper of this rank, or the attempt after us, may have made the same manifest of the same
        # parts.
        _check_same(store, name, manifests.parse(text, name))
    failpoint("keeper.manifest")
    try:
        check_not_fenced(store, writer.attempt)
    except Conflict:
        # A newer attempt began between the check and the write, and may already be tidying up after this one.
        if len(part_sizes(store, step, writer.attempt)) < writer.world_size:
            store.delete(name)
        raise
    facts = names.parse(name)
    assert facts is not None
    note_saved(store, writer.run, facts.checkpoint_id)


def put_manifest(store: Store, step: int, name: str, text: bytes) -> bool:
    """Write a manifest durably, after the names of the checkpoint's files are.

    Return False if an object of this name exists already; it is durable too then, and unchanged.
    """
    # Invariant: whatever a manifest names is durable before it (notes 001 and 019).
    # Visible is not yet durable: other ranks' keepers may not have come to the fsync of their files' names.
    folder = names.step_dir(step)
    store.sync(folder)
    try:
        # The commit: before this object exists the checkpoint does not, afterwards it is complete.
        store.put(name, text, if_absent=True)
    except Conflict:
        store.sync(folder)
        return False
    return True


def _check_same(store: Store, name: str, expected: Manifest) -> None:
    found = manifests.parse(store.get(name), name)
    if (found.run, found.parts) != (expected.run, expected.parts):
        message = f"{name} in {store.url} describes other files than those of this save. It was not changed."
        raise Corrupt(message, step=expected.step, key=name)


def refuse(store: Store, writer: WriterId, step: int, error: InvalidInput) -> None:
    """Write a refusal of `step`, with its reason, for the keepers of the other ranks."""
    refusal = Refusal(writer.run, writer.attempt, step, str(error), error.rank, error.key)
    store.put(names.refusal(step, writer.attempt), document(refusal))


def check_not_refused(store: Store, writer: WriterId, step: int) -> None:
    """Raise if a rank has refused the save, with its reason."""
    name = names.refusal(step, writer.attempt)
    if store.size(name) is None:
        return
    refusal = parse(Refusal, store.get(name), name)
    raise InvalidInput(refusal.reason, step=step, rank=refusal.rank, key=refusal.key)


def was_retired(store: Store, writer: WriterId, step: int) -> bool:
    """Return True if retention has deleted a committed save behind a newer one.

    Call this after a part of the save was found missing. A save that was deleted without ever being committed
    has a refusal, written before its files were deleted.
    """
    own = [facts for _, facts in scan(store, "step-") if facts.attempt == writer.attempt]
    newest = max((facts.step for facts in own if facts.kind == "manifest"), default=-1)
    if newest <= step:
        return False
    check_not_refused(store, writer, step)
    check_not_fenced(store, writer.attempt)
    refused = [facts.step for facts in own if facts.kind == "refusal"]
    # Half of the limit, as a listing beside deletions may lack some.
    if len(refused) >= MAX_REFUSALS // 2 and step < min(refused):
        raise RetryLater(
            f"It is not known whether step {step} was committed. Retention deleted its files after {newest} "
            f"was committed, and the record of saves that attempt {writer.attempt} refused is full. "
            "See the messages of rank 0.",
            step=step,
        )
    store.sync(names.step_dir(newest))
    return True


def is_committed(store: Store, writer: WriterId, step: int) -> bool:
    """Return True if the manifest of `step` of this attempt is visible; `Store.sync` makes it durable."""
    return store.size(names.manifest(step, writer.attempt)) is not None


def read_committed(store: Store, writer: WriterId, step: int) -> Manifest | None:
    """Return the manifest of `step` of this attempt, checked to be of this rank's files; None without one."""
    name = names.manifest(step, writer.attempt)
    try:
        found = manifests.parse(store.get(name), name)
        part_name = names.part(step, writer.attempt, writer.rank)
        own = parse_part(store.get(part_name), part_name).seal
    except NotFound:
        return None
    its_own = next((part.seal for part in found.parts if part.rank == writer.rank), None)
    if (found.run, its_own) != (writer.run, own):
        message = f"{name} in {store.url} does not name the files that rank {writer.rank} has written."
        raise Corrupt(message, step=step, rank=writer.rank, key=name)
    return found


def recover_commit(store: Store, saved: ListedSave, run_id: str | None) -> bool:
    """Write the manifest of one save if everything else of it exists.

    A save whose parts are missing, damaged or do not belong together is left as it is: it was never promised
    to exist. Return True if it is committed now and was not in the listing, whichever process committed it.
    """
    merged = merge_saved(store, saved, run_id)
    if merged is None:
        return False
    # If a manifest exists by now, its own keeper, or another rank's restore, was first.
    put_manifest(store, saved.step, names.manifest(saved.step, saved.attempt), manifests.document(merged))
    note_saved(store, merged.run, saved.checkpoint_id)
    return True


def merge_saved(store: Store, saved: ListedSave, run_id: str | None) -> Manifest | None:
    """Return the manifest that a save lacks, if everything else of it exists. Writes nothing."""
    if saved.is_committed or not saved.parts or saved.parts.keys() != saved.data.keys():
        return None
    try:
        merged = make_manifest(read_draft(store, saved, rank) for rank in sorted(saved.parts))
    except (Corrupt, NotFound, Unsupported, InvalidInput):
        return None
    return merged if run_id in (None, merged.run) else None


def find_loadable(store: Store, run_id: str | None) -> list[CheckpointId]:
    """Return all checkpoints that can be loaded, newest first: also saves that lack only their manifest."""
    listing = list_home(store)
    found = set(candidates(listing))
    for checkpoint, saved in listing.saved.items():
        if merge_saved(store, saved, run_id) is not None:
            found.add(checkpoint)
    return sorted(found, reverse=True)


def merge_in_memory(store: Store, checkpoint: CheckpointId, run_id: str | None) -> Store | None:
    """Return a store with the manifest that a save lacks; None if it has one by now.

    For readers, which must not commit what a living writer may be about to commit or refuse.
    """
    for copy in store.copies():
        saved = list_home(copy, step=checkpoint.step).saved.get(checkpoint)
        merged = None if saved is None else merge_saved(copy, saved, run_id)
        if merged is not None:
            made = MemoryStore("manifest")
            made.put(names.manifest(checkpoint.step, checkpoint.attempt), manifests.document(merged))
            return made
    return None
