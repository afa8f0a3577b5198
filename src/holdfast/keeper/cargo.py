"""What comes home of one checkpoint: whose files this rank sends, and the manifest when all are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from holdfast.format import manifest as manifests
from holdfast.format import names
from holdfast.format import part as parts
from holdfast.format.part import Ancestors, Part
from holdfast.home.commit import merge_parts
from holdfast.home.listing import scan_step
from holdfast.keeper.config import KeeperConfig
from holdfast.store import Store

Sizes = Mapping[str, int]
"""Bytes of each object of the step that is in home, by name."""


class Cargo(ABC):
    """One checkpoint on its way home."""

    ranks: tuple[int, ...]
    """Saved ranks whose files this rank sends."""

    @abstractmethod
    def manifest(self, there: Sizes) -> bytes | None:
        """The manifest, if every file that it names is in home; only rank 0 asks."""

    @abstractmethod
    def lacking(self, there: Sizes) -> list[str]:
        """What is known to be missing in home."""

    @abstractmethod
    def ancestors(self) -> Ancestors:
        """Its ancestors; asked when it is complete in home."""


class Whole(Cargo):
    """A checkpoint that is complete in the near tier: its manifest is copied like its files.

    Raises:
        NotFound: it is not there any more.
        Corrupt: its manifest is damaged.
        RetryLater: the store failed.
    """

    def __init__(self, near: Store, terms: KeeperConfig, attempt: int, step: int) -> None:
        name = names.manifest(step, attempt)
        self._document = near.get(name)
        self._manifest = manifests.parse(self._document, name)
        self.ranks = tuple(rank for rank in range(self._manifest.world_size) if terms.is_mine(rank))

    def manifest(self, there: Sizes) -> bytes | None:
        """See `Cargo.manifest`."""
        return None if self.lacking(there) else self._document

    def lacking(self, there: Sizes) -> list[str]:
        """See `Cargo.lacking`."""
        step, attempt = self._manifest.step, self._manifest.attempt
        wanted: dict[str, int] = {}
        for file in self._manifest.parts:
            wanted[names.part(step, attempt, file.rank)] = file.part_bytes
            wanted[names.data(step, attempt, file.rank)] = file.data_bytes
            if file.frozen_bytes is not None:
                wanted[names.frozen(step, attempt, file.rank)] = file.frozen_bytes
        return _unlike(wanted, there)

    def ancestors(self) -> Ancestors:
        """See `Cargo.ancestors`."""
        return self._manifest.ancestors


class Share(Cargo):
    """A scattered checkpoint: this folder has some ranks' files, and nobody sees all of them but home.

    Raises:
        RetryLater: the store failed.
    """

    def __init__(self, near: Store, home: Store, terms: KeeperConfig, attempt: int, step: int) -> None:
        self._home, self._terms = home, terms
        self._attempt, self._step = attempt, step
        self._sizes: dict[int, Sizes] = {}  # by saved rank, of the files that its part names
        self._world_size: int | None = None
        parts_of = (facts for _, facts in scan_step(near, step) if facts.kind == "part")
        held = {facts.rank for facts in parts_of if facts.attempt == attempt}
        self.ranks = tuple(rank for rank in sorted(held) if terms.is_mine(rank))

    def manifest(self, there: Sizes) -> bytes | None:
        """See `Cargo.manifest`.

        Raises:
            InvalidInput: the parts do not fit together.
            Corrupt: a part is damaged.
            RetryLater: home failed.
        """
        if self.lacking(there):
            return None
        assert self._world_size is not None
        return manifests.document(
            merge_parts(self._home, self._terms.writer, self._attempt, self._step, self._world_size)
        )

    def lacking(self, there: Sizes) -> list[str]:
        """See `Cargo.lacking`; reads each part that is there once.

        Raises:
            Corrupt: a part is damaged.
            NotFound: a part has just been deleted.
            RetryLater: home failed.
        """
        for rank in self._ranks_in(there):
            if rank not in self._sizes:
                self._sizes[rank] = self._read(rank, there)
        if self._world_size is None:
            return ["any part"]
        wanted = {name: size for sizes in self._sizes.values() for name, size in sizes.items()}
        absent = set(range(self._world_size)) - self._sizes.keys()
        return [names.part(self._step, self._attempt, rank) for rank in sorted(absent)] + _unlike(
            wanted, there
        )

    def ancestors(self) -> Ancestors:
        """See `Cargo.ancestors`.

        Raises:
            NotFound: it has been deleted from home.
            Corrupt: its manifest is damaged.
            RetryLater: home failed.
        """
        name = names.manifest(self._step, self._attempt)
        return manifests.parse(self._home.get(name), name).ancestors

    def _ranks_in(self, there: Sizes) -> Iterator[int]:
        for name in there:
            facts = names.parse(name)
            if facts and facts.kind == "part" and facts.attempt == self._attempt:
                yield facts.rank

    def _read(self, rank: int, there: Sizes) -> Sizes:
        name = names.part(self._step, self._attempt, rank)
        part: Part = parts.parse(self._home.get(name), name)
        self._world_size = part.world_size
        return {name: there[name]} | {file: facts.num_bytes for file, facts in part.files.items()}


def _unlike(wanted: Sizes, there: Sizes) -> list[str]:
    """Names of what is not there with its right size."""
    return [name for name, num_bytes in wanted.items() if there.get(name) != num_bytes]
