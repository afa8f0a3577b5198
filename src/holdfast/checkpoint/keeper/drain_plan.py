"""Drain plan of a checkpoint: ranks whose files this rank sends home, and the manifest once all exist."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from typing_extensions import override

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors, Part
from holdfast.checkpoint.home.commit import merge_parts
from holdfast.checkpoint.home.judges import Judges
from holdfast.checkpoint.home.listing import scan_step
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.store import Store

Sizes = Mapping[str, int]
"""Bytes of each object of the step in home, by name."""


class DrainPlan(ABC):
    """Plan of one checkpoint.

    Attributes:
        ranks: saved ranks whose files this rank sends.
    """

    ranks: tuple[int, ...]

    @abstractmethod
    def manifest(self, in_home: Sizes) -> bytes | None:
        """Return the manifest, or None if a file that it names is missing in home. Only rank 0 calls this."""

    @abstractmethod
    def missing(self, in_home: Sizes) -> list[str]:
        """Return the names of missing files, as far as home shows them."""

    @abstractmethod
    def ancestors(self) -> Ancestors:
        """Return the ancestors of a checkpoint that is complete in home."""


class FullDrain(DrainPlan):
    """Plan of a checkpoint that is complete in the local tier. Its manifest is copied like its files."""

    def __init__(self, local: Store, config: KeeperConfig, checkpoint: CheckpointId) -> None:
        name = names.manifest(checkpoint.step, checkpoint.attempt)
        self._document = local.get(name)
        self._manifest = manifests.parse(self._document, name)
        world_size = self._manifest.world_size
        self.ranks = tuple(rank for rank in range(world_size) if config.is_responsible_for(rank))

    @override
    def manifest(self, in_home: Sizes) -> bytes | None:
        return None if self.missing(in_home) else self._document

    @override
    def missing(self, in_home: Sizes) -> list[str]:
        step, attempt = self._manifest.step, self._manifest.attempt
        expected: dict[str, int] = {}
        for file in self._manifest.parts:
            expected[names.part(step, attempt, file.rank)] = file.part_bytes
            expected[names.data(step, attempt, file.rank)] = file.data_bytes
            if file.frozen_bytes is not None:
                expected[names.frozen(step, attempt, file.rank)] = file.frozen_bytes
        return _missing(expected, in_home)

    @override
    def ancestors(self) -> Ancestors:
        return self._manifest.ancestors


class PartialDrain(DrainPlan):
    """Plan of a node-local checkpoint. This folder has the files of some ranks; only home receives all.

    Args:
        judges: of this attempt.
    """

    def __init__(
        self,
        local: Store,
        home: Store,
        config: KeeperConfig,
        checkpoint: CheckpointId,
        judges: Judges,
    ) -> None:
        self._home, self._config, self._judges = home, config, judges
        self._checkpoint = checkpoint
        self._sizes: dict[int, Sizes] = {}  # of the files that a part names, by saved rank
        self._world_size: int | None = None
        found = (facts for _, facts in scan_step(local, checkpoint.step) if facts.kind == "part")
        saved = {facts.rank for facts in found if facts.attempt == checkpoint.attempt}
        self.ranks = tuple(rank for rank in sorted(saved) if config.is_responsible_for(rank))

    @override
    def manifest(self, in_home: Sizes) -> bytes | None:
        """Return a manifest of the parts in home, or None if files are missing."""
        if self.missing(in_home):
            return None
        assert self._world_size is not None
        return manifests.document(
            merge_parts(
                self._home,
                self._config.writer,
                self._checkpoint,
                self._world_size,
                judges=self._judges if self._checkpoint.attempt == self._config.attempt else None,
            )
        )

    @override
    def missing(self, in_home: Sizes) -> list[str]:
        """Return the names of missing files, as far as the parts in home name them. Reads each part once."""
        for rank in self._ranks_in(in_home):
            if rank not in self._sizes:
                self._sizes[rank] = self._read_sizes(rank, in_home)
        if self._world_size is None:
            return ["any part"]
        expected = {name: size for sizes in self._sizes.values() for name, size in sizes.items()}
        absent = sorted(set(range(self._world_size)) - self._sizes.keys())
        absent_parts = [names.part(self._checkpoint.step, self._checkpoint.attempt, rank) for rank in absent]
        return absent_parts + _missing(expected, in_home)

    @override
    def ancestors(self) -> Ancestors:
        """Return the ancestors of the checkpoint in home."""
        name = names.manifest(self._checkpoint.step, self._checkpoint.attempt)
        return manifests.parse(self._home.get(name), name).ancestors

    def _ranks_in(self, in_home: Sizes) -> Iterator[int]:
        for name in in_home:
            facts = names.parse(name)
            if facts and facts.kind == "part" and facts.attempt == self._checkpoint.attempt:
                yield facts.rank

    def _read_sizes(self, rank: int, in_home: Sizes) -> Sizes:
        name = names.part(self._checkpoint.step, self._checkpoint.attempt, rank)
        part: Part = parts.parse(self._home.get(name), name)
        self._world_size = part.world_size
        return {name: in_home[name]} | {file: facts.num_bytes for file, facts in part.files.items()}


def _missing(expected: Sizes, in_home: Sizes) -> list[str]:
    """Return the names of files that do not exist in home with their right size."""
    return [name for name, num_bytes in expected.items() if in_home.get(name) != num_bytes]
