"""Interface of the benchmark to each way of saving."""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pagecache import sync
from states import Subject


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Pending:
    """A save whose call has returned.

    `wait_staged` returns when training may change the state; `wait_complete` when the peer calls the
    checkpoint saved. Both return at once where the call itself waited.
    """

    wait_staged: Callable[[], object] = _nothing
    wait_complete: Callable[[], object] = _nothing


class Peer(ABC):
    """One way of saving a subject's state into a directory, in its best configuration for one process."""

    title: ClassVar[str]
    module: ClassVar[str]
    """Module that must be importable."""
    syncs: ClassVar[bool]
    """True if "complete" includes an fsync of the data."""
    overlaps: ClassVar[bool]
    """True if the save goes on after its call."""
    own_load: ClassVar[bool] = True
    """False if another peer has the same load, which is then measured there only."""
    loads_with: ClassVar[str | None] = None
    """Function that the adapter loads with, if the method has none of its own."""
    package: ClassVar[str | None] = None
    """Distribution that has the module, for its version; None: those in the facts of the machine."""

    def __init__(self, subject: Subject, directory: Path) -> None:
        self.subject = subject
        self.directory = directory

    @abstractmethod
    def open(self) -> None:
        """Start what is needed; not timed."""

    @abstractmethod
    def save(self, step: int) -> Pending:
        """Save; returns when the peer's own call returns."""

    @abstractmethod
    def load(self, step: int) -> None:
        """Bring the state of `step` back into the live model and optimizer."""

    @abstractmethod
    def close(self) -> None:
        """Stop what `open` started; not timed."""

    def prepare(self) -> None:
        """Pay costs of the first save beforehand, if the peer has a way to; not timed."""
        return

    def guard(self) -> contextlib.AbstractContextManager[object]:
        """Stands around optimizer.step(); entering it waits until the state may change."""
        return contextlib.nullcontext()

    def state_dicts(self) -> dict[str, Any]:
        """Return the live state dicts of the model and, if there is one, of the optimizer."""
        state: dict[str, Any] = {"model": self.subject.model.state_dict()}
        if self.subject.optimizer is not None:
            state["optimizer"] = self.subject.optimizer.state_dict()
        return state

    def set_state_dicts(self, found: dict[str, Any]) -> None:
        """Bring state dicts that were loaded into the live model and optimizer."""
        self.subject.model.load_state_dict(found["model"])
        if self.subject.optimizer is not None:
            self.subject.optimizer.load_state_dict(found["optimizer"])

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`."""
        return self.directory / f"step-{step}"

    def settle(self) -> None:
        """Wait until nothing of earlier saves is on its way to the disk; not timed."""
        sync(self.directory)

    def delete(self, step: int) -> None:
        """Remove a checkpoint; not timed."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
