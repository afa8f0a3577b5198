"""Checkpoint: a tag with partitions, to be saved or to be loaded."""

from __future__ import annotations

from typing import Any

from holdfast.adapters.nebula.current import session
from holdfast.adapters.nebula.location import MapLocation
from holdfast.adapters.nebula.session import Session
from holdfast.adapters.nebula.shelf import Volume
from holdfast.adapters.nebula.tags import check_num_of_files, check_tag
from holdfast.errors import InvalidInput, NotFound


class Checkpoint:
    """The state of one moment under a tag: any number of partitions, saved and loaded one by one.

    It is complete, and is saved as a whole, when `num_of_files` partitions have been saved under its tag by
    all ranks together, or when `commit` says so. Where the count is not given the first partition completes
    it, and a later one makes a new version that holds both.

    Args:
        tag: such as "global_step500"; any other text too.
        num_of_files: how many partitions all ranks together save; -2: until `commit`.

    Raises:
        InvalidInput: no tag, or no such number.

    Attributes:
        tag: the tag; "" where a search found none.
    """

    def __init__(self, tag: str, num_of_files: int | None = None) -> None:
        self.tag = check_tag(tag)
        self._num_of_files = check_num_of_files(num_of_files)
        self._volume: Volume | None = None
        self._session: Session | None = session()
        self._session.announce(tag, self._num_of_files)

    @classmethod
    def found(cls, session: Session | None, volume: Volume | None) -> Checkpoint:
        """What a search has found; with the tag "" if that is nothing."""
        made = cls.__new__(cls)
        made.tag = "" if volume is None else volume.tag
        made._num_of_files, made._volume, made._session = None, volume, session
        return made

    def __repr__(self) -> str:
        return f"Checkpoint({self.tag!r})"

    def save(self, name: str, value: Any) -> None:
        """Save one partition, as `torch.save` would: what it holds may be changed when this returns.

        Args:
            name: of the partition.
            value: tensors, plain values, containers of these; modules, optimizers and whatever else has
                state_dict() and load_state_dict() are saved as their state dicts.

        Raises:
            InvalidInput, Unsupported: something in it has no place in a checkpoint, named by its key path.
            HoldfastError: this save failed, or one before it.

        Ranks: not collective; other ranks may save other partitions, or none.
        Blocks: for the copy; and where several ranks complete their first tag together, until all are there.
        """
        self._of_session().save(self.tag, name, value, self._num_of_files)

    def commit(self) -> bool:
        """Complete the tag with what was saved under it.

        Returns:
            True if it is complete: copied, and in the hands of the keeper, which finishes even if this
            process dies. What goes wrong there is told by the next call.

        Raises:
            HoldfastError: this save failed, or one before it.

        Ranks: each rank that takes part calls it.
        Blocks: as `save`.
        """
        return self._of_session().commit(self.tag)

    def load(self, name: str, map_location: MapLocation = None) -> Any:
        """One partition, verified, from the nearest tier that has it whole.

        Args:
            name: of the partition. If several ranks have saved one of this name it is this rank's own, else
                that of the lowest rank.
            map_location: as `torch.load` takes it; None brings every tensor back to its device.

        Raises:
            NotFound: there is no such checkpoint or partition.
            Corrupt: damage was found; nothing was loaded.
            RetryLater: a store failed.
        """
        if not self.tag:
            message = (
                "There is no checkpoint to load from yet: its tag is ''. Begin from nothing in that case."
            )
            raise NotFound(message)
        session = self._of_session()
        volume = self._volume or session.find(self.tag)
        if volume is None:
            message = f"{session.home} holds no complete checkpoint {self.tag!r}."
            raise NotFound(message, key=self.tag)
        return session.load(volume, name, map_location)

    def _of_session(self) -> Session:
        if self._session is None or not self.tag:
            message = "This is what a search returned that found no checkpoint. Make one with a tag to save."
            raise InvalidInput(message)
        return self._session
