"""The file of frozen tensors: written once, then linked into each checkpoint while it stays the same."""

from __future__ import annotations

import contextlib

from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.format import names
from holdfast.format import part as parts
from holdfast.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.format.part import DataFile
from holdfast.home.listing import scan
from holdfast.keeper import rate
from holdfast.keeper.config import KeeperConfig
from holdfast.keeper.persist import has_image
from holdfast.store import Store


class FrozenFile:
    """The newest file of this rank's frozen tensors, of whatever step and attempt."""

    def __init__(self, store: Store, terms: KeeperConfig) -> None:
        self._store = store
        self._terms = terms
        self._newest: tuple[str, DataFile] | None = None
        self._before: DataFile | None = None  # what the save before had, whether or not it became durable
        self._has_looked = False

    def persist(self, step: int, image: memoryview, *, must_match: bool) -> DataFile:
        """Put the image into a checkpoint: by a link if its bytes stand in the store already.

        Args:
            step: step of the checkpoint.
            image: the file.
            must_match: the image was copied beside the training, in the belief that nothing changes it.

        Raises:
            Conflict: other bytes have that name.
            InvalidInput: `must_match`, but it differs from the file of the save before, or nothing is known
                of that: it may be torn.
            RetryLater: the store failed.

        Blocks: until the bytes are durable under their new name.
        """
        chunk_bytes = chunk_bytes_for(len(image))
        file = DataFile(len(image), chunk_bytes, hash_chunks(image, chunk_bytes))
        self._find_newest()
        if must_match:
            self._check_unchanged(step, file)
        self._before = file
        name = names.frozen(step, self._terms.attempt, self._terms.rank)
        if self._store.size(name) is None and self.link(name, file):
            return file
        try:
            rate.put(self._store, name, image, self._terms.straight_bandwidth)
        except Conflict:  # a keeper before this one may have put or linked it
            if not has_image(self._store, name, file):
                raise
        self.note(name, file)
        return file

    def link(self, name: str, file: DataFile) -> bool:
        """Give the newest file another name, if it has the same bytes; False: they have to be sent.

        Raises:
            RetryLater: the store failed.

        Blocks: until the name is durable.
        """
        newest = self._find_newest()
        if newest is None or newest[1] != file or not self._link(newest[0], name, file.num_bytes):
            return False
        self.note(name, file)
        return True

    def note(self, name: str, file: DataFile) -> None:
        """Remember a file that has been put into the store."""
        self._newest = name, file

    def _check_unchanged(self, step: int, file: DataFile) -> None:
        before = self._before or (self._newest[1] if self._newest else None)
        if before == file:
            return
        reason = (
            "but their bytes differ from that save's. Something writes them past PyTorch's version counters, "
            "such as an in-place change through .data"
            if before is not None
            else "but that save failed before their hashes were known, so nothing proves it"
        )
        message = (
            f"Step {step} was dropped: tensors that no optimizer of the state trains were copied beside the "
            f"training, since they had not changed since the save before, {reason}. Earlier checkpoints "
            "stand; these tensors are copied at once from now on."
        )
        raise InvalidInput(message, step=step, rank=self._terms.rank)

    def _link(self, source: str, name: str, num_bytes: int) -> bool:
        """Link, if the source is still there and whole; else it has to be written again."""
        if source == name:
            return True
        try:
            self._store.link(source, name)
        except (NotFound, Unsupported):
            return False
        if self._store.size(name) == num_bytes:
            return True
        self._store.delete(name)  # the source is damaged, and the name is for whole bytes
        return False

    def _find_newest(self) -> tuple[str, DataFile] | None:
        """What an earlier keeper or attempt has written, looked for once."""
        if self._newest is None and not self._has_looked:
            self._has_looked = True
            for attempt, step in sorted(self._parts_with_frozen(), reverse=True):
                name = names.part(step, attempt, self._terms.rank)
                with contextlib.suppress(Corrupt, NotFound, Unsupported):
                    found = parts.parse(self._store.get(name), name).frozen
                    if found is not None:
                        self._newest = names.frozen(step, attempt, self._terms.rank), found
                        break
        return self._newest

    def _parts_with_frozen(self) -> list[tuple[int, int]]:
        found = (facts for _, facts in scan(self._store, "step-") if facts.kind == "frozen")
        return [(facts.attempt, facts.step) for facts in found if facts.rank == self._terms.rank]
