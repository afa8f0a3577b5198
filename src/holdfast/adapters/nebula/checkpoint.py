"""Checkpoint: a tag with partitions that are saved or loaded."""

from __future__ import annotations

from typing import Any

from holdfast.adapters.nebula.default_session import session
from holdfast.adapters.nebula.map_location import MapLocation
from holdfast.adapters.nebula.session import Session
from holdfast.adapters.nebula.tag_index import TaggedCheckpoint
from holdfast.adapters.nebula.tags import check_num_of_files, check_tag
from holdfast.errors import InvalidInput, NotFound


class Checkpoint:
    """State under a tag: any number of partitions that are saved and loaded one by one.

    The checkpoint is complete when all ranks together have saved `num_of_files` partitions under its tag,
    or when `commit` is called. Without the number, the first partition completes it, and a later one makes
    a new version that contains both.

    Args:
        tag: tag; "" if a search did not find a checkpoint.
        num_of_files: number of partitions that all ranks together save; -2 if `commit` completes the
            checkpoint.

    Raises:
        InvalidInput: the tag is empty, or the number is invalid.

    Attributes:
        tag: the tag; "" where a search found none.
    """

    def __init__(self, tag: str, num_of_files: int | None = None) -> None:
        self.tag = check_tag(tag)
        self._num_of_files = check_num_of_files(num_of_files)
        self._tagged: TaggedCheckpoint | None = None
        self._session: Session | None = session()
        self._session.join(tag, self._num_of_files)

    @classmethod
    def found(cls, session: Session | None, tagged: TaggedCheckpoint | None) -> Checkpoint:
        """Return the result of a search, with the tag "" if `tagged` is None."""
        made = cls.__new__(cls)
        made.tag = "" if tagged is None else tagged.tag
        made._num_of_files, made._tagged, made._session = None, tagged, session
        return made

    def __repr__(self) -> str:
        return f"Checkpoint({self.tag!r})"

    def save(self, name: str, value: Any) -> None:
        """Save one partition, as `torch.save` would. You may change its objects when this returns.

        Args:
            name: name of the partition.
            value: tensors, plain values and containers of these. Modules, optimizers and other objects with
                state_dict() and load_state_dict() are saved as their state dicts.

        Raises:
            InvalidInput, Unsupported: an object cannot be saved. The message has its key path.
            HoldfastError: this save failed, or an earlier one.

        Ranks: not collective. Other ranks may save other partitions or none.
        Blocks: for the copy. When several ranks complete their first tag together, until all of them save.
        """
        self._require_session().save(self.tag, name, value, self._num_of_files)

    def commit(self) -> bool:
        """Complete the tag with the partitions that were saved under it.

        Returns:
            True if the checkpoint is copied and submitted to the keeper, which finishes it even if this
            process dies. The next call raises its errors.

        Raises:
            HoldfastError: this save failed, or an earlier one.

        Ranks: each rank that saves to the tag must call it.
        Blocks: like `save`.
        """
        return self._require_session().commit(self.tag)

    def load(self, name: str, map_location: MapLocation = None) -> Any:
        """Load one partition, verified, from the nearest tier that has it.

        Args:
            name: name of the partition. If several ranks have saved it, this rank's own is loaded, or else
                the lowest rank's.
            map_location: as in `torch.load`; None loads every tensor to its device.

        Raises:
            NotFound: the checkpoint or partition does not exist.
            Corrupt: the checkpoint is damaged. Nothing was loaded.
            RetryLater: a store failed.
        """
        if not self.tag:
            raise NotFound(
                "There is no checkpoint to load yet: the tag is ''. Check for that, and start from scratch."
            )
        session = self._require_session()
        tagged = self._tagged or session.find(self.tag)
        if tagged is None:
            raise NotFound(f"{session.home} has no complete checkpoint {self.tag!r}.", key=self.tag)
        return session.load(tagged, name, map_location)

    def _require_session(self) -> Session:
        if self._session is None or not self.tag:
            raise InvalidInput(
                "This is the result of a search that did not find a checkpoint. Create a Checkpoint with "
                "a tag to save."
            )
        return self._session
