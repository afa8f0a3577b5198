"""Checkpoints whose files are in local folders of several hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.home.commit import make_manifest, parse_parts
from holdfast.checkpoint.home.documents import read_draft
from holdfast.checkpoint.home.listing import ListedSave, Listing, list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import first_good
from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported


@dataclass(frozen=True, slots=True)
class Holding(OfCheckpoint):
    """A rank's complete files of one checkpoint, with a part that matches them."""

    attempt: int
    step: int
    rank: int  # the rank that saved them
    world_size: int  # of the attempt that saved them
    part_bytes: int
    part_xxh3: str
    data_bytes: int
    frozen_bytes: int | None

    def wire(self) -> dict[str, Any]:
        """Return its members, to be sent to other ranks."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NodeLocalCheckpoint:
    """A checkpoint that is incomplete in home, but complete in several tiers together."""

    checkpoint: CheckpointId
    files: tuple[Holding, ...]  # by the rank that saved
    holders: Mapping[int, tuple[int, ...]]  # by the rank that saved, the living ranks that can read its files

    @property
    def listing(self) -> Listing:
        """Listing of a place that had all its files."""
        saved = ListedSave(step=self.checkpoint.step, attempt=self.checkpoint.attempt)
        for file in self.files:
            saved.parts[file.rank] = file.part_bytes
            saved.data[file.rank] = file.data_bytes
            if file.frozen_bytes is not None:
                saved.frozen[file.rank] = file.frozen_bytes
        return Listing((), {self.checkpoint: saved}, ())

    def sent_by(self, rank: int) -> list[Holding]:
        """Return the files whose parts a rank sends to the others; each part is sent by one rank."""
        return [file for file in self.files if self.holders[file.rank][0] == rank]


def find_holdings(
    store: Store, run_id: str | None, *, besides: Collection[CheckpointId] = ()
) -> list[Holding]:
    """Return the files in a store that match their parts, of any rank and step.

    Args:
        run_id: id of the run; parts of other runs are left out. None for any run.
        besides: checkpoints to leave out.
    """
    found: list[Holding] = []
    for checkpoint, saved in list_home(store).saved.items():
        if checkpoint in besides:
            continue
        for rank in sorted(saved.parts.keys() & saved.data.keys()):
            try:
                part, text = read_draft(store, saved, rank)
            except (Corrupt, NotFound, Unsupported):
                continue
            if run_id is None or part.run == run_id:
                frozen_bytes = None if part.frozen is None else part.frozen.num_bytes
                found.append(
                    Holding(
                        attempt=checkpoint.attempt,
                        step=checkpoint.step,
                        rank=rank,
                        world_size=part.world_size,
                        part_bytes=len(text),
                        part_xxh3=digest(text),
                        data_bytes=part.file.num_bytes,
                        frozen_bytes=frozen_bytes,
                    )
                )
    return found


def put_together(
    local: Sequence[Iterable[Holding]], in_home: Iterable[Holding]
) -> tuple[list[NodeLocalCheckpoint], dict[CheckpointId, list[int]]]:
    """Return the checkpoints that all places hold together, and the missing ranks of others.

    Pure, so that every rank computes the same.

    Args:
        local: files in the folder of each rank.
        in_home: files in home of checkpoints that are incomplete there.

    Returns:
        The complete checkpoints; and for the others the ranks whose files no place has.
    """
    everyone = tuple(range(len(local)))
    copies: dict[CheckpointId, dict[int, dict[Holding, tuple[int, ...]]]] = {}

    def add(file: Holding, holders: tuple[int, ...]) -> None:
        of_rank = copies.setdefault(file.checkpoint_id, {}).setdefault(file.rank, {})
        of_rank[file] = (*of_rank.get(file, ()), *holders)

    for file in in_home:
        add(file, everyone)
    for rank, files in enumerate(local):
        for file in files:
            add(file, (rank,))
    complete: list[NodeLocalCheckpoint] = []
    lacking: dict[CheckpointId, list[int]] = {}
    for checkpoint, by_rank in copies.items():
        world_size = max(file.world_size for found in by_rank.values() for file in found)
        absent = [rank for rank in range(world_size) if rank not in by_rank]
        if absent:
            lacking[checkpoint] = absent
            continue
        # No file is written twice with other bytes. If it were, the copy that most ranks can read is used.
        chosen = [max(by_rank[rank].items(), key=lambda copy: len(copy[1])) for rank in range(world_size)]
        holders = {file.rank: tuple(sorted(set(ranks))) for file, ranks in chosen}
        complete.append(NodeLocalCheckpoint(checkpoint, tuple(file for file, _ in chosen), holders))
    return complete, lacking


def read_texts(store: Store, files: Iterable[Holding]) -> dict[int, str]:
    """Return the part documents of some ranks' files, by rank."""
    texts: dict[int, str] = {}
    for file in files:
        name = names.part(file.step, file.attempt, file.rank)
        texts[file.rank] = first_good(store, partial(_text, name, file)).decode()
    return texts


def _text(name: str, file: Holding, copy: Store) -> bytes:
    text = copy.get(name)
    if digest(text) != file.part_xxh3:
        raise Corrupt(
            f"{copy.url}/{name} has changed since it was found by this start.",
            step=file.step,
            rank=file.rank,
            key=name,
        )
    return text


def assemble(found: NodeLocalCheckpoint, texts: Mapping[int, str]) -> MemoryStore:
    """Return the documents of a node-local checkpoint in memory, with the manifest of its commit.

    Pure but for the store that it makes: every rank makes the same manifest.
    """
    store, step, attempt = MemoryStore("parts"), found.checkpoint.step, found.checkpoint.attempt
    documents = [(names.part(step, attempt, rank), texts[rank].encode()) for rank in range(len(found.files))]
    joined = digest(b"".join(text for _, text in documents))
    try:
        manifest: Manifest = make_manifest(parse_parts(documents), id=joined, created_unix_s=0.0)
    except InvalidInput as error:  # not the caller's fault here
        raise Corrupt(str(error), step=step, rank=error.rank, key=error.key) from error
    for name, text in documents:
        store.put(name, text)
    store.put(names.manifest(step, attempt), manifests.document(manifest))
    return store
