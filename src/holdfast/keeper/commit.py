"""Commit: make a checkpoint visible once every rank's part is there, unless the attempt is fenced."""

from __future__ import annotations

import time
import uuid

from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound
from holdfast.format import manifest as manifests
from holdfast.format import names
from holdfast.format.hashes import digest
from holdfast.format.manifest import Manifest
from holdfast.format.run import Refusal, document, parse
from holdfast.home.attempts import check_claim, check_not_fenced, note_saved
from holdfast.keeper.terms import Terms
from holdfast.killpoint import kill_point
from holdfast.store import Store


def missing_ranks(store: Store, terms: Terms, step: int) -> list[int]:
    """Ranks whose part of `step` is not in the store yet."""
    prefix = f"{names.step_dir(step)}/"
    found = (names.parse(entry.name) for entry in store.list(prefix))
    there = {
        f.rank for f in found if f and f.kind == "part" and f.attempt == terms.attempt and f.step == step
    }
    return [rank for rank in range(terms.world_size) if rank not in there]


def commit(store: Store, terms: Terms, step: int) -> manifests.Manifest:
    """Write the manifest of `step`, whose parts are all there. Only rank 0's keeper calls this.

    Raises:
        Conflict: this attempt is fenced.
        InvalidInput: the parts do not fit together.
        Corrupt: a part is damaged.
        RetryLater: the store failed.

    Blocks: until the manifest is durable.
    """
    name = names.manifest(step, terms.attempt)
    check_not_fenced(store, terms.attempt)
    check_claim(store, terms.attempt, terms.claim)
    manifest = merge_parts(store, terms, terms.attempt, step, terms.world_size)
    publish(store, terms, step, name, manifests.document(manifest))
    return manifest


def merge_parts(store: Store, terms: Terms, attempt: int, step: int, world_size: int) -> manifests.Manifest:
    """The manifest of a checkpoint whose parts are all there. Only rank 0's keeper calls this.

    That the parts do not fit together is told to the keepers of the other ranks too, who wait for it.

    Args:
        store: where the parts are.
        terms: of the keeper.
        attempt: that saved it.
        step: of the checkpoint.
        world_size: ranks that saved it.

    Raises:
        InvalidInput: the parts do not fit together.
        Corrupt: a part is damaged.
        RetryLater: the store failed.
    """
    part_names = [names.part(step, attempt, rank) for rank in range(world_size)]
    documents = ((part_name, store.get(part_name)) for part_name in part_names)
    try:
        return manifests.merge_documents(documents, id=uuid.uuid4().hex, created_unix_s=time.time())
    except InvalidInput as error:
        if attempt == terms.attempt and world_size > 1:
            refuse(store, terms, step, error)
        raise


def publish(store: Store, terms: Terms, step: int, name: str, document: bytes) -> None:
    """Make a checkpoint visible whose files are all there, unless this attempt is fenced by now.

    Args:
        store: where.
        terms: of rank 0's keeper, which alone calls this.
        step: of the checkpoint.
        name: of its manifest.
        document: the manifest.

    Raises:
        Conflict: this attempt is fenced.
        Corrupt: another manifest has this name.
        RetryLater: the store failed.

    Blocks: until the manifest is durable.
    """
    # Visible is not yet durable: other ranks' keepers may not have come to the fsync of their files' names.
    folder = names.step_dir(step)
    store.sync(folder)
    try:
        # The commit: before this object exists the checkpoint does not, afterwards it is complete.
        store.put(name, document, if_absent=True)
    except Conflict:
        # An earlier keeper of this rank, or the attempt after us, may have made the same manifest of the same
        # parts.
        _check_same(store, name, manifests.parse(document, name))
        store.sync(folder)
    kill_point("keeper.manifest")
    try:
        check_not_fenced(store, terms.attempt)
    except Conflict:
        # A newer attempt began between look and write, and may already be tidying up after this one.
        if missing_ranks(store, terms, step):
            store.delete(name)
        raise
    facts = names.parse(name)
    assert facts is not None
    note_saved(store, terms.run, facts.attempt, step)


def _check_same(store: Store, name: str, expected: Manifest) -> None:
    found = manifests.parse(store.get(name), name)
    if (found.run, found.parts) != (expected.run, expected.parts):
        message = f"{name} in {store.url} describes other files than those of this save. It was left alone."
        raise Corrupt(message, step=expected.step, key=name)


def refuse(store: Store, terms: Terms, step: int, error: InvalidInput) -> None:
    """Tell the keepers of the other ranks that `step` will not be committed, and why.

    Raises:
        RetryLater: the store failed.
    """
    refusal = Refusal(terms.run, terms.attempt, step, str(error), error.rank, error.key)
    store.put(names.refusal(step, terms.attempt), document(refusal))


def check_not_refused(store: Store, terms: Terms, step: int) -> None:
    """Raise what rank 0 said against a save.

    Raises:
        InvalidInput: the parts of the save do not fit together.
        Corrupt: rank 0 said something that cannot be read.
        RetryLater: the store failed.
    """
    name = names.refusal(step, terms.attempt)
    if store.size(name) is None:
        return
    said = parse(Refusal, store.get(name), name)
    raise InvalidInput(said.reason, step=step, rank=said.rank, key=said.key)


def is_committed(store: Store, terms: Terms, step: int) -> bool:
    """True if the manifest of `step` of this attempt is visible; `Store.sync` makes it durable."""
    return store.size(names.manifest(step, terms.attempt)) is not None


def read_committed(store: Store, terms: Terms, step: int) -> Manifest | None:
    """Return the manifest of `step` of this attempt, checked to be of this rank's files; None without one.

    Raises:
        Corrupt: it is damaged, or names other files.
        RetryLater: the store failed.
    """
    name = names.manifest(step, terms.attempt)
    try:
        found = manifests.parse(store.get(name), name)
        own = digest(store.get(names.part(step, terms.attempt, terms.rank)))
    except NotFound:
        return None
    its_own = next((part.part_xxh3 for part in found.parts if part.rank == terms.rank), None)
    if (found.run, its_own) != (terms.run, own):
        message = f"{name} in {store.url} does not name the files that rank {terms.rank} has written."
        raise Corrupt(message, step=step, rank=terms.rank, key=name)
    return found


def newest_committed(store: Store, terms: Terms) -> int:
    """Highest step of this attempt that has a manifest; -1 if none."""
    found = (names.parse(entry.name) for entry in store.list("step-"))
    return max(
        (f.step for f in found if f and f.kind == "manifest" and f.attempt == terms.attempt), default=-1
    )
