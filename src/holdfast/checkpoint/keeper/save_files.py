"""Files of one rank of a save: data file, file of frozen tensors, and the part that describes them."""

from __future__ import annotations

import contextlib
import itertools
import os
import time

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.hashes import short_digest
from holdfast.checkpoint.format.part import Copies, DataFile
from holdfast.checkpoint.format.sections import Sections
from holdfast.checkpoint.home.claim import check_claim, check_not_fenced
from holdfast.checkpoint.home.listing import scan
from holdfast.checkpoint.home.metrics import SaveValues, write_metrics
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.inbox import StagedSave
from holdfast.checkpoint.keeper.persist import describe_file, has_image, persist, put
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.system import backoff
from holdfast.system.failpoint import failpoint

_LONGEST_PAUSE_S = 10.0
"""Longest pause before another try: a disk that has space again is used soon."""


class SaveFiles:
    """Writer of a rank's files, in the tier that saves are committed in first."""

    def __init__(self, components: KeeperComponents) -> None:
        self._store, self._config = components.store, components.config
        self._inbox, self._reports = components.inbox, components.reports
        self._watches = components.watches
        self._frozen = FrozenFile(self._store, self._config)
        # Of one save. Another try to write its part has the same ones, as a part is never replaced.
        self._sections: Sections | None = None

    def persist(self, save: StagedSave, arena: memoryview, metrics: SaveValues) -> None:
        """Write the files of a save durably.

        If the store fails, this is repeated a few times, or for as long as training waits, and each new kind
        of error reported; but not if a newer save waits, which is worth more than another try of this one.
        """
        began_s, reported = time.monotonic(), ""
        self._sections = None
        for num_failures in itertools.count(1):
            try:
                self._try_persist(save, arena, metrics)
            except TRANSIENT_ERRORS as error:
                retry_for_s = 0.0 if self._inbox.trainer_gone else self._config.pause_s
                is_last = num_failures > self._config.num_retries
                if self._inbox.has_saves or (is_last and time.monotonic() - began_s >= retry_for_s):
                    raise
                if error.kind != reported:
                    reported = error.kind
                    self._inbox.report_delay(save.request.step, str(error))
                time.sleep(backoff.doubled(num_failures, self._config.retry_s, _LONGEST_PAUSE_S))
            else:
                return

    def replace_metrics(self, step: int, metrics: SaveValues) -> None:
        """Replace the metrics of a save, unless it has failed, or was deleted."""
        if self._store.size(names.part(step, self._config.attempt, self._config.rank)) is not None:
            write_metrics(self._store, self._config.writer, step, metrics, self._config.modes)

    def _try_persist(self, save: StagedSave, arena: memoryview, metrics: SaveValues) -> None:
        check_not_fenced(self._store, self._config.attempt)
        check_claim(self._store, self._config.attempt, self._config.claim)
        step = save.request.step
        try:
            self._create(save, arena, metrics)
        except Conflict as error:
            if not self._delete_unfinished(step):
                raise InvalidInput(
                    f"Step {step} of attempt {self._config.attempt} was written before with other bytes "
                    f"({error}), which are never replaced. This save was given up; the files remain. Save a "
                    "later step.",
                    step=step,
                    rank=self._config.rank,
                ) from error
            self._create(save, arena, metrics)

    def _delete_unfinished(self, step: int) -> bool:
        """Delete the data files of an earlier try, unless a part describes them."""
        attempt, rank = self._config.attempt, self._config.rank
        if self._store.size(names.part(step, attempt, rank)) is not None:
            return False
        self._store.delete(names.data(step, attempt, rank))
        self._store.delete(names.frozen(step, attempt, rank))
        return True

    def _create(self, save: StagedSave, arena: memoryview, metrics: SaveValues) -> None:
        config, step, layout = self._config, save.request.step, save.request.layout
        frozen = None
        if layout.frozen_bytes:  # first: if it is refused, nothing else needs to be written
            image = arena[layout.frozen_at : layout.frozen_at + layout.frozen_bytes]
            frozen = self._frozen.persist(step, image, must_match=layout.is_frozen_unchanged)
        name, image = names.data(step, config.attempt, config.rank), arena[: layout.data_bytes]
        on_hashed = self._watches.persisting(image) if self._sections is None else None
        file = persist(self._store, name, image, bytes_per_s=config.persist_bandwidth, on_hashed=on_hashed)
        failpoint("keeper.data")
        self._reports.history.settle()  # before each part
        if metrics.values:  # before the part: a complete checkpoint has its metrics
            write_metrics(self._store, config.writer, step, metrics, config.modes)
        draft = os.pread(save.draft_fd, os.fstat(save.draft_fd).st_size, 0)
        name = names.part(step, config.attempt, config.rank)
        if self._sections is None:
            found, copies = parts.findings_of(draft, name)
            self._sections = self._watches.persisted(step, found, _hash_copies(copies, arena, name))
        self._put_part(name, parts.finish(draft, file, frozen, self._sections))
        failpoint("keeper.part")

    def _put_part(self, name: str, document: bytes) -> None:
        """Write a part. One that an earlier keeper wrote stays, if it differs in findings of watches only.

        Else such a finding, which may depend on the time of day, would turn a durable save into a failed one.
        """
        try:
            self._store.put_once(name, document)
        except Conflict:
            if not parts.differ_in_watches_only(self._store.get(name), document, name):
                raise
            self._store.sync(name.rpartition("/")[0])


def _hash_copies(copies: Copies, arena: memoryview, what: str) -> dict[str, tuple[str, ...]]:
    """Return the hashes of the copies that each watch has planned, in about 0.1 s per GB."""
    most = max((at + num_bytes for rows in copies.values() for at, num_bytes in rows), default=0)
    if most > len(arena):
        raise Corrupt(f"{what} orders bytes to {most} of {len(arena)}.", key=what)
    return {
        name: tuple(short_digest(arena[at : at + num_bytes]) for at, num_bytes in rows)
        for name, rows in copies.items()
    }


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
        file = describe_file(image)
        self._find_newest()
        if must_match:
            self._check_unchanged(step, file)
        self._previous = file
        name = names.frozen(step, self._config.attempt, self._config.rank)
        if self._store.size(name) is None and self.link(name, file):
            return file
        try:
            put(self._store, name, image, self._config.persist_bandwidth)
        except Conflict:  # an earlier keeper may have written or linked it
            if not has_image(self._store, name, file):
                raise
        self.remember(name, file)
        return file

    def link(self, name: str, file: DataFile) -> bool:
        """Link the newest file under another name, durably, if it has the same bytes. Return False if not."""
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
            rank = self._config.rank
            saves = (facts for _, facts in scan(self._store, "step-") if facts.kind == "frozen")
            own = sorted(facts.checkpoint_id for facts in saves if facts.rank == rank)
            for attempt, step in reversed(own):
                name = names.part(step, attempt, rank)
                with contextlib.suppress(Corrupt, NotFound, Unsupported):
                    found = parts.parse(self._store.get(name), name).frozen
                    if found is not None:
                        self._newest = names.frozen(step, attempt, rank), found
                        break
        return self._newest
