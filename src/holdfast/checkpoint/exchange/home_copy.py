"""Copy of one checkpoint as a home of its own, verified on the way."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.home.claim import check_run
from holdfast.checkpoint.home.documents import read_part
from holdfast.checkpoint.keeper.persist import verified_blocks
from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt


def copy_checkpoint(
    source: Store, target: Store, manifest: Manifest, *, on_bytes: Callable[[int], None] = lambda count: None
) -> None:
    """Copy a checkpoint into an empty place, and verify every byte on the way.

    Args:
        manifest: of a checkpoint in `source`.
        on_bytes: called with the bytes of each file that is complete.

    Blocks: until all is written; in memory there is one block at a time.
    """
    step, attempt = manifest.step, manifest.attempt
    check_run(target, manifest.run)
    for rank in range(manifest.world_size):
        part = read_part(source, manifest, rank)
        files = {names.data(step, attempt, rank): part.file}
        if part.frozen is not None:
            files[names.frozen(step, attempt, rank)] = part.frozen
        for name, file in files.items():
            target.put_parts(name, verified_blocks(source, name, file), file.num_bytes)
            on_bytes(file.num_bytes)
        name = names.part(step, attempt, rank)
        target.put(name, _same_document(source, name, manifest.parts[rank].part_xxh3))
    name = names.manifest(step, attempt)
    target.put(name, source.get(name))  # last, as a save does


def _same_document(source: Store, name: str, expected: str) -> bytes:
    text = source.get(name)
    if digest(text) != expected:
        raise Corrupt(f"{name} in {source.url} has changed while it was copied.", key=name)
    return text
