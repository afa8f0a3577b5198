"""Drain plan of a checkpoint: ranks whose files this rank sends home, and the manifest once all exist."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.commit import merge_parts
from holdfast.checkpoint.home.documents import expected_sizes
from holdfast.checkpoint.home.judges import Judges
from holdfast.checkpoint.home.listing import scan_step
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.store import Store

Sizes = Mapping[str, int]
"""Bytes of each object of the step in home, by name."""


class DrainPlan:
    """Plan of one checkpoint.

    If it is complete in the local tier, its manifest names all files, and is copied like them. A node-local
    folder has the files of some ranks: there the parts that arrive in home name the files, and the manifest
    is made of them.
    """

    def __init__(
        self, local: Store, home: Store, config: KeeperConfig, checkpoint: CheckpointId, judges: Judges
    ) -> None:
        self._home, self._config, self._judges, self._checkpoint = home, config, judges, checkpoint
        self._name = names.manifest(checkpoint.step, checkpoint.attempt)
        self._manifest: Manifest | None = None  # of the local tier
        self._expected: dict[int, dict[str, int]] = {}  # files of each saved rank, as far as they are known
        if config.is_node_local:
            found = (facts for _, facts in scan_step(local, checkpoint.step) if facts.kind == "part")
            saved = {facts.rank for facts in found if facts.attempt == checkpoint.attempt}
            self._world_size: int | None = None
        else:
            self._document = local.get(self._name)
            self._manifest = manifests.parse(self._document, self._name)
            self._expected = expected_sizes(self._manifest)
            self._world_size = self._manifest.world_size
            saved = set(range(self._world_size))
        # Saved ranks whose files this rank sends:
        self.ranks = tuple(rank for rank in sorted(saved) if config.is_responsible_for(rank))

    def manifest(self, in_home: Sizes) -> bytes | None:
        """Return the manifest, or None if a file that it names is missing in home. Only rank 0 calls this."""
        if self.missing(in_home):
            return None
        if self._manifest is not None:
            return self._document
        assert self._world_size is not None
        is_own = self._checkpoint.attempt == self._config.attempt
        judges = self._judges if is_own else None
        return manifests.document(
            merge_parts(self._home, self._config.writer, self._checkpoint, self._world_size, judges=judges)
        )

    def missing(self, in_home: Sizes) -> list[str]:
        """Return the names of missing files, as far as documents name them; read each part in home once."""
        step, attempt = self._checkpoint.step, self._checkpoint.attempt
        if self._manifest is None:
            for name in in_home:
                facts = names.parse(name)
                if facts and facts.kind == "part" and facts.attempt == attempt:
                    self._read_part(name, facts.rank, in_home[name])
        if self._world_size is None:
            return ["any part"]
        absent = sorted(set(range(self._world_size)) - self._expected.keys())
        files = {name: size for sizes in self._expected.values() for name, size in sizes.items()}
        return [names.part(step, attempt, rank) for rank in absent] + [
            name for name, num_bytes in files.items() if in_home.get(name) != num_bytes
        ]

    def ancestors(self) -> Ancestors:
        """Return the ancestors of a checkpoint that is complete in home."""
        found = self._manifest or manifests.parse(self._home.get(self._name), self._name)
        return found.ancestors

    def _read_part(self, name: str, rank: int, num_bytes: int) -> None:
        if rank not in self._expected:
            part = parts.parse(self._home.get(name), name)
            self._world_size = part.world_size
            self._expected[rank] = {name: num_bytes} | {
                file: facts.num_bytes for file, facts in part.files.items()
            }
