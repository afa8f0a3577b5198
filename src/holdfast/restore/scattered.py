"""Checkpoints whose files lie in folders of several hosts: who has which, and what is complete together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.format import manifest as manifests
from holdfast.format import names
from holdfast.format.hashes import digest
from holdfast.format.manifest import Manifest
from holdfast.home.commit import make_manifest, parse_parts
from holdfast.home.documents import read_draft
from holdfast.home.listing import ListedSave, Listing, list_home
from holdfast.store.contract import Store
from holdfast.store.memory import MemoryStore
from holdfast.store.nearest import first_good

Id = tuple[int, int]  # (attempt, step), the order of checkpoints


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank's files of one checkpoint, all there and described by a part whose seal is whole."""

    attempt: int
    step: int
    rank: int  # that saved them
    world_size: int  # of the attempt that saved
    part_bytes: int
    part_xxh3: str
    data_bytes: int
    frozen_bytes: int | None

    def wire(self) -> dict[str, Any]:
        """Its members, as they travel."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Scattered:
    """A checkpoint that home does not call complete, and whose files are nevertheless all somewhere."""

    step: int
    attempt: int
    files: tuple[Holding, ...]  # by the rank that saved
    holders: Mapping[int, tuple[int, ...]]  # by the rank that saved, the living ranks that can read its files

    @property
    def listing(self) -> Listing:
        """What a listing would show if one place had all its files."""
        saved = ListedSave(self.step, self.attempt)
        for file in self.files:
            saved.parts[file.rank] = file.part_bytes
            saved.data[file.rank] = file.data_bytes
            if file.frozen_bytes is not None:
                saved.frozen[file.rank] = file.frozen_bytes
        return Listing((), {(self.step, self.attempt): saved}, ())

    def sent_by(self, rank: int) -> list[Holding]:
        """The files whose parts a living rank is to tell the others: each part is told by one rank."""
        return [file for file in self.files if self.holders[file.rank][0] == rank]


def find_holdings(store: Store, run_id: str | None, *, besides: Collection[Id] = ()) -> list[Holding]:
    """The files that a store has of any rank and step, as far as their parts describe them rightly.

    Args:
        store: where to look.
        run_id: the run; parts of other runs do not count. None: whatever run.
        besides: checkpoints not to look at.

    Raises:
        RetryLater: the store failed.
    """
    found: list[Holding] = []
    for (step, attempt), saved in list_home(store).saved.items():
        if (attempt, step) in besides:
            continue
        for rank in sorted(saved.parts.keys() & saved.data.keys()):
            try:
                part, text = read_draft(store, saved, rank)
            except (Corrupt, NotFound, Unsupported):
                continue
            if run_id is None or part.run == run_id:
                frozen_bytes = None if part.frozen is None else part.frozen.num_bytes
                sizes = len(text), digest(text), part.file.num_bytes, frozen_bytes
                found.append(Holding(attempt, step, rank, part.world_size, *sizes))
    return found


def put_together(
    local: Sequence[Iterable[Holding]], in_home: Iterable[Holding]
) -> tuple[list[Scattered], dict[Id, list[int]]]:
    """What is complete if all places are taken together, and what is not.

    Pure, so that every rank computes the same.

    Args:
        local: by living rank, what its own folder has.
        in_home: what home has of checkpoints that it does not call complete.

    Returns:
        The complete ones, and of the others the ranks whose files are nowhere.
    """
    everyone = tuple(range(len(local)))
    copies: dict[Id, dict[int, dict[Holding, tuple[int, ...]]]] = {}

    def add(file: Holding, holders: tuple[int, ...]) -> None:
        of_rank = copies.setdefault((file.attempt, file.step), {}).setdefault(file.rank, {})
        of_rank[file] = (*of_rank.get(file, ()), *holders)

    for file in in_home:
        add(file, everyone)
    for rank, files in enumerate(local):
        for file in files:
            add(file, (rank,))
    complete: list[Scattered] = []
    lacking: dict[Id, list[int]] = {}
    for one, by_rank in copies.items():
        world_size = max(file.world_size for found in by_rank.values() for file in found)
        absent = [rank for rank in range(world_size) if rank not in by_rank]
        if absent:
            lacking[one] = absent
            continue
        # Nobody writes a file twice with other bytes; should it be so, the copy that most can read is taken.
        chosen = [max(by_rank[rank].items(), key=lambda copy: len(copy[1])) for rank in range(world_size)]
        holders = {file.rank: tuple(sorted(set(ranks))) for file, ranks in chosen}
        complete.append(Scattered(one[1], one[0], tuple(file for file, _ in chosen), holders))
    return complete, lacking


def read_texts(store: Store, files: Iterable[Holding]) -> dict[int, str]:
    """The part documents of some ranks' files, by rank.

    Args:
        store: where they can be read.
        files: whose.

    Raises:
        NotFound, Corrupt: a part has changed since it was found.
        RetryLater: the store failed.
    """
    texts: dict[int, str] = {}
    for file in files:
        name = names.part(file.step, file.attempt, file.rank)
        texts[file.rank] = first_good(store, partial(_text, name, file)).decode()
    return texts


def _text(name: str, file: Holding, copy: Store) -> bytes:
    text = copy.get(name)
    if digest(text) != file.part_xxh3:
        message = f"{copy.url}/{name} has changed since it was found by this start."
        raise Corrupt(message, step=file.step, rank=file.rank, key=name)
    return text


def assemble(found: Scattered, texts: Mapping[int, str]) -> MemoryStore:
    """The documents of a scattered checkpoint in memory, with the manifest that its commit would write.

    Pure but for the store that it makes: every rank makes the same manifest.

    Raises:
        Corrupt: the parts do not fit together, or one cannot be read.
    """
    store = MemoryStore("parts")
    documents = [
        (names.part(found.step, found.attempt, rank), texts[rank].encode())
        for rank in range(len(found.files))
    ]
    joined = digest(b"".join(text for _, text in documents))
    try:
        manifest: Manifest = make_manifest(parse_parts(documents), id=joined, created_unix_s=0.0)
    except InvalidInput as error:  # not the caller's fault here
        raise Corrupt(str(error), step=found.step, rank=error.rank, key=error.key) from error
    for name, text in documents:
        store.put(name, text)
    store.put(names.manifest(found.step, found.attempt), manifests.document(manifest))
    return store
