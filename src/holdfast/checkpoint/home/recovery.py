"""Recovery of saves that lack only their manifest, since their keeper ended before the commit."""

from __future__ import annotations

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.attempts import note_saved
from holdfast.checkpoint.home.commit import make_manifest, put_manifest
from holdfast.checkpoint.home.documents import read_draft
from holdfast.checkpoint.home.listing import ListedSave, candidates, list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported


def recover_commit(store: Store, saved: ListedSave, run_id: str | None) -> bool:
    """Write the manifest of one save if everything else of it exists.

    A save whose parts are missing, damaged or do not belong together is left as it is: it was never promised
    to exist.

    Returns:
        True if it is committed now and was not in the listing, whichever process committed it.
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
    for one, saved in listing.saved.items():
        if merge_saved(store, saved, run_id) is not None:
            found.add(one)
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
