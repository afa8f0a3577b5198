"""Candidates for a load: checkpoints in homes, and folders that Accelerate has written itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.adapters.accelerate.folders import Folders, read_marker
from holdfast.adapters.accelerate.stock_folder import automatic_number, find_fault, is_stock
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Candidate:
    """State to load.

    Attributes:
        folder: its folder.
        step: step of the checkpoint; None for a folder that Accelerate has written itself.
        home: home of the checkpoint if it is another run's.
    """

    folder: str
    step: int | None
    home: str | None = None


class LoadCandidates:
    """Candidates of one load.

    Args:
        folders: folders of the run.
        names: name of each complete checkpoint's folder, by step.
        complete: steps of the complete checkpoints.
        ranks: ranks that load.
        num_optimizers: number of optimizers to load.
        is_automatic: folders have the names of `automatic_checkpoint_naming`.
    """

    def __init__(
        self,
        folders: Folders,
        names: Mapping[int, str],
        complete: Collection[int],
        *,
        ranks: Collection[int],
        num_optimizers: int,
        is_automatic: bool,
    ) -> None:
        self._folders, self._names, self._complete = folders, names, complete
        self._ranks, self._num_optimizers = ranks, num_optimizers
        self._is_automatic = is_automatic

    def newest_first(self) -> list[Candidate]:
        """Return all candidates of the run, the newest first.

        Folders that Accelerate has written are among them if their names have an order.
        """
        own = [
            Candidate(str(self._folders.path(name)), step) for step, name in sorted(self._names.items())[::-1]
        ]
        if not self._is_automatic:
            return own
        stock = [
            Candidate(str(path), None)
            for name in self._folders.list()
            if automatic_number(name) is not None
            and is_stock(path := self._folders.path(name))
            and read_marker(path) is None
        ]
        return sorted([*own, *stock], key=_number, reverse=True)

    def of_path(self, path: Path, home: str) -> Candidate:
        """Return the candidate that a path names.

        Args:
            path: folder that `save_state` was called with.
            home: path or URL of the run's home.

        Raises:
            InvalidInput: the folder does not exist, its state is not complete, or its home would send your
                keys to an unknown server.
        """
        if not path.is_dir():
            raise InvalidInput(f"Tried to find {path} but folder does not exist. Nothing was loaded.")
        marker = read_marker(path)
        if marker is None:
            self.check_stock(path)
            return Candidate(str(path), None)
        if not self._folders.is_ours(marker):
            check_endpoint(marker.home, f"The folder {path}", own=home)
            return Candidate(str(path), marker.steps[-1], marker.home)
        steps = [step for step in marker.steps if step in self._complete]
        if not steps:
            newest = self.newest_first()
            advice = f"The newest that is: {newest[0].folder}." if newest else "There is no other."
            raise InvalidInput(
                f"{path} is of a save that was interrupted before it was complete in {home}. Nothing was "
                f"loaded. {advice} If attach() is given the home, it removes such folders at the start."
            )
        return Candidate(str(path), steps[-1])

    def check_stock(self, folder: Path) -> None:
        """Check a folder that Accelerate has written itself.

        Raises:
            InvalidInput: it is not complete.
        """
        fault = find_fault(folder, ranks=self._ranks, num_optimizers=self._num_optimizers)
        if fault is not None:
            raise InvalidInput(f"No state can be loaded from {folder}: {fault}. Nothing was loaded.")


def _number(candidate: Candidate) -> int:
    number = automatic_number(Path(candidate.folder).name)
    return -1 if number is None else number
