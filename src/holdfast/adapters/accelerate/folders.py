"""Folders of a run with Accelerate: those that refer to a home, and its own."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.adapters.kit.run import HOME
from holdfast.adapters.kit.saved_files import folder_fault, read_json
from holdfast.system.documents import to_plain
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.partial_files import partial_file, remove_folder, remove_partial_files
from holdfast.system.log import get_logger

_NUMBER = re.compile(r"([0-9]+)\D*$")
_AUTOMATIC = re.compile(r"checkpoint_([0-9]+)")
_MAX_DIGITS = 15
_MODELS = ("model", "pytorch_model")


def number_of(name: str) -> int | None:
    """Return the last number in a folder's name, such as 500 of "step_500"; None without one."""
    match = _NUMBER.search(name)
    return None if match is None or len(match[1]) > _MAX_DIGITS else int(match[1])


def automatic_number(name: str) -> int | None:
    """Return N of a folder `checkpoint_N`, as `automatic_checkpoint_naming` makes it; None for another."""
    match = _AUTOMATIC.fullmatch(name)
    return None if match is None else int(match[1])


def is_stock(folder: Path) -> bool:
    """Return True if Accelerate has written something into a folder."""
    return any(folder.glob("random_states_*.pkl")) or any(_models(folder))


def find_fault(folder: Path, *, ranks: Collection[int], num_optimizers: int) -> str | None:
    """Return why a state cannot be loaded from a folder of Accelerate; None if it can."""
    if not any(_models(folder)):
        return "it has no model"
    needed = [f"random_states_{rank}.pkl" for rank in ranks]
    if not any(folder.glob("optimizer_0")):  # a folder of FSDP
        needed += [f"optimizer{f'_{number}' if number else ''}.bin" for number in range(num_optimizers)]
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        return f"{missing[0]} is missing"
    return folder_fault(folder)


def _models(folder: Path) -> list[Path]:
    return [path for name in _MODELS for path in sorted(folder.glob(f"{name}*"))]


_log = get_logger("adapters")
_MARKER = "holdfast_checkpoint.json"
_MOVED = "interrupted-"


class FolderMarker(Struct, frozen=True):
    """Content of the file that names a folder's checkpoint."""

    home: Annotated[str, Meta(pattern=r"\A[^\0\ud800-\udfff]*\Z")]  # URL, or path from the folder
    steps: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]  # the newest last
    is_new: bool = False  # the save has made the folder; what is in it belongs to the checkpoint


def read_marker(folder: Path) -> FolderMarker | None:
    """Return the marker of a folder, with an absolute home; None if it does not have one."""
    found = read_json(folder / _MARKER, FolderMarker)
    if found is None or "://" in found.home:
        return found
    return replace(found, home=os.path.normpath(folder.absolute() / found.home))


class Folders:
    """Folders of one run."""

    def __init__(self, root: Path, home: str, *, writes: bool) -> None:
        self.root, self._home, self._writes = root.absolute(), home, writes

    def name(self, folder: str | os.PathLike[str]) -> str:
        """Return a folder's name: its path from the root if it is in there, else from `/`."""
        path = Path(os.path.normpath(Path(folder).absolute()))
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def list(self) -> list[str]:
        """Return the names of all folders in the root, except the home."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and path.name != HOME)

    def path(self, name: str) -> Path:
        """Return the path of a folder."""
        return self.root / name

    def make(self, name: str, step: int, *, complete: Collection[int]) -> None:
        """Create the folder of a step, or add the step to its marker."""
        if not self._writes:
            return
        folder = self.path(name)
        before = read_marker(folder)
        is_new = before.is_new if before is not None else not (folder.is_dir() and any(folder.iterdir()))
        earlier = before.steps if before is not None and self.is_ours(before) else ()
        steps = (*(one for one in earlier if one in complete and one != step), step)
        home = self._home if "://" in self._home else os.path.relpath(self._home, folder)
        _write(folder, json.dumps(to_plain(FolderMarker(home, steps, is_new))) + "\n")

    def is_ours(self, marker: FolderMarker) -> bool:
        """Return True if a marker names the home of this run."""
        return os.path.realpath(marker.home) == os.path.realpath(self._home) or marker.home == self._home

    def remove(self, name: str) -> None:
        """Remove the folder of a deleted checkpoint, whatever it contains."""
        if self._writes:
            remove_folder(self.path(name))

    def tidy(self, names: Mapping[int, str], complete: Collection[int]) -> None:
        """Make the folders match the home: create missing ones, and remove those of no checkpoint."""
        if not self._writes:
            return
        if self.root.is_dir():
            remove_partial_files(self.root)
        for step, name in names.items():
            if read_marker(self.path(name)) is None:
                _log.warning(
                    "%s is the folder of step %d, which is complete in %s. It was missing, and was made "
                    "again. To delete a checkpoint that no training uses: `holdfast rm`.",
                    self.path(name),
                    step,
                    self._home,
                )
                self.make(name, step, complete=complete)
        markers = sorted(self.root.glob(f"*/{_MARKER}"))
        for folder in [path.parent for path in markers if path.parent.name != HOME]:
            marker = read_marker(folder)
            if marker is None or not self.is_ours(marker) or set(marker.steps) & set(complete):
                continue
            if marker.is_new and max(marker.steps) < min(complete, default=0):  # deleted, as too many
                self.remove(self.name(folder))
            else:
                self.remove_interrupted(self.name(folder))

    def remove_interrupted(self, name: str) -> None:
        """Remove the folder of an interrupted save; move it aside if hooks have written to it."""
        folder = self.path(name)
        marker = read_marker(folder)
        if not self._writes or marker is None:
            return
        if {one.name for one in folder.iterdir()} == {_MARKER}:
            remove_folder(folder)
        elif marker.is_new:
            aside = folder.with_name(_MOVED + folder.name)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            (aside / _MARKER).unlink()
            _log.warning("%s is of an interrupted save. It was moved to %s.", folder, aside)
        else:
            (folder / _MARKER).unlink()


def _write(folder: Path, content: str) -> None:
    """Write the marker of a folder. A new folder appears together with its marker."""
    if folder.is_dir():
        write_atomic(folder / _MARKER, content, is_durable=False)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(folder, mode=0o777, is_folder=True) as partial:
        (partial / _MARKER).write_text(content)
        partial.rename(folder)
