"""File of frozen tensors: written once, then linked into each checkpoint while its bytes stay the same."""

from __future__ import annotations

import contextlib

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.home.listing import scan
from holdfast.checkpoint.keeper import rate
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.persist import has_image
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported


class FrozenFile:
    """Newest file of this rank's frozen tensors in a store, of any step and attempt."""

    def __init__(self, store: Store, config: KeeperConfig) -> None:
        self._store = store
        self._config = config
        self._newest: tuple[str, DataFile] | None = None
        self._previous: DataFile | None = None  # of the previous save, even if that did not become durable
        self._has_searched = False

    def persist(self, step: int, image: memoryview, *, must_match: bool) -> DataFile:
        """Write the image into a checkpoint. If the store has its bytes already, link them.

        Args:
            must_match: the image was copied beside training, on the assumption that nothing changes it.

        Blocks: until the bytes are durable under their new name.
        """
        chunk_bytes = chunk_bytes_for(len(image))
        file = DataFile(len(image), chunk_bytes, hash_chunks(image, chunk_bytes))
        self._find_newest()
        if must_match:
            self._check_unchanged(step, file)
        self._previous = file
        name = names.frozen(step, self._config.attempt, self._config.rank)
        if self._store.size(name) is None and self.link(name, file):
            return file
        try:
            rate.put(self._store, name, image, self._config.persist_bandwidth)
        except Conflict:  # an earlier keeper may have written or linked it
            if not has_image(self._store, name, file):
                raise
        self.remember(name, file)
        return file

    def link(self, name: str, file: DataFile) -> bool:
        """Link the newest file under another name if it has the same bytes. Return False if it has not.

        Blocks: until the name is durable.
        """
        newest = self._find_newest()
        if newest is None or newest[1] != file or not self._link(newest[0], name, file.num_bytes):
            return False
        self.remember(name, file)
        return True

    def remember(self, name: str, file: DataFile) -> None:
        """Remember a file that was written to the store, as the newest."""
        self._newest = name, file

    def _check_unchanged(self, step: int, file: DataFile) -> None:
        before = self._previous or (self._newest[1] if self._newest else None)
        if before == file:
            return
        reason = (
            "but their bytes differ from that save's. Something writes to them without PyTorch's version "
            "counters, such as an in-place change through .data"
            if before is not None
            else "but that save failed before their hashes were known, so nothing proves it"
        )
        raise InvalidInput(
            f"Step {step} was dropped. Tensors that no optimizer of the state trains were copied in the "
            f"background, as they seemed unchanged since the previous save, {reason}. Earlier checkpoints "
            "remain. From now on these tensors are copied before save() returns.",
            step=step,
            rank=self._config.rank,
        )

    def _link(self, source: str, name: str, num_bytes: int) -> bool:
        """Link a file. Return False if it is missing or damaged, so that it must be written again."""
        if source == name:
            return True
        try:
            self._store.link(source, name)
        except (NotFound, Unsupported):
            return False
        if self._store.size(name) == num_bytes:
            return True
        self._store.delete(name)  # the source is damaged
        return False

    def _find_newest(self) -> tuple[str, DataFile] | None:
        """Return the newest file, after one search for those of earlier keepers and attempts."""
        if self._newest is None and not self._has_searched:
            self._has_searched = True
            for one in sorted(self._saves_with_frozen(), reverse=True):
                name = names.part(one.step, one.attempt, self._config.rank)
                with contextlib.suppress(Corrupt, NotFound, Unsupported):
                    found = parts.parse(self._store.get(name), name).frozen
                    if found is not None:
                        self._newest = names.frozen(one.step, one.attempt, self._config.rank), found
                        break
        return self._newest

    def _saves_with_frozen(self) -> list[CheckpointId]:
        found = (facts for _, facts in scan(self._store, "step-") if facts.kind == "frozen")
        return [facts.checkpoint_id for facts in found if facts.rank == self._config.rank]
