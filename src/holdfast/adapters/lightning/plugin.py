"""CheckpointIO for Lightning and Fabric: saves in the background, and loads verified files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from holdfast.adapters.lightning.background import BackgroundSaver
from holdfast.adapters.lightning.ckpt_file import Facts, FileId, pickle_content, verify_ckpt
from holdfast.adapters.lightning.packages import TorchCheckpointIO
from holdfast.adapters.lightning.places import HomePlace, absolute, folder_of, home_beside, is_local
from holdfast.checkpoint.run.options import Memory
from holdfast.errors import Corrupt, SaveWarning
from holdfast.system.callsite import warn
from holdfast.system.linux.partial_files import temporary_folder

_FULL = ("optimizer_states", "loops")
"""Entries without which Lightning cannot resume training."""


class HoldfastCheckpointIO(TorchCheckpointIO):
    """CheckpointIO that saves in the background: `Fabric(plugins=[HoldfastCheckpointIO("runs/x.holdfast")])`.

    Each save is copied to memory at once, made durable in `home`, and then written as the file that Lightning
    asks for: an ordinary one of torch.save, with the hashes of its records. With a Trainer, use
    `HoldfastCheckpoint`, which sets this plugin, and also resumes exactly.

    Args:
        home: folder or URL for the newest checkpoint; by default the folder of the first file with
            ".holdfast" appended, beside that folder.
        memory: limit of the staging memory.
        wait: return from each save when its file is written.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        *,
        memory: int | str | Memory = "8GiB",
        wait: bool = False,
    ) -> None:
        super().__init__()
        self.home = None if home is None else absolute(home)
        self._memory, self._wait = memory, wait
        self._saver: BackgroundSaver | None = None

    # -- CheckpointIO ----------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint for a path or an fsspec URL, with the options of its file system.

        Its tensors are copied before this returns, but for those of the optimizers while a Trainer trains.

        Raises:
            TypeError: `storage_options` is not a mapping, or the path is local.
            HoldfastError: this save failed, or an earlier one.

        Blocks: for the copy; outside of training until the file is written.
        """
        target = absolute(path)
        saver = self.saver_for(target, _parse_options(storage_options, target))
        facts = Facts(
            saver.place.relative(target),
            _integer(checkpoint.get("global_step")),
            _integer(checkpoint.get("epoch")),
            all(key in checkpoint for key in _FULL),
        )
        saver.save(pickle_content(checkpoint), target, facts, () if self._wait else saver.private())
        if self._wait:
            saver.wait(target)
        elif not saver.is_training():
            saver.close()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint of a path or fsspec URL. Files that Holdfast has written are verified first.

        A file that is missing or damaged is written again from the home, if it is there.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            Corrupt: the file is damaged, and the home does not hold its checkpoint.
        """
        target = absolute(path)
        if self._saver is not None:
            self._saver.wait(target)
        if not is_local(target):
            return self._load_remote(target, map_location, weights_only)
        file = self._verify(target)
        loaded = super().load_checkpoint(path, map_location, weights_only)
        if file is not None and (saver := self._existing_saver(target)) is not None:
            saver.continue_from(file)
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file of a path. The home loses its checkpoint after the next save."""
        target = absolute(path)
        if self._saver is not None:
            self._saver.remove(target)
        if is_local(target) and Path(target).is_symlink():
            Path(target).unlink()  # perhaps of a file that is not written yet
        else:
            super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait until all files are written, at the end of a trainer's work."""
        super().teardown()
        if self._saver is not None:
            self._saver.close()

    def wait(self, path: str | os.PathLike[str] | None = None) -> None:
        """Wait until a file, or all files, are written.

        Raises:
            HoldfastError, OSError: a save failed, or a file could not be written.
        """
        if self._saver is not None:
            self._saver.wait(None if path is None else absolute(path))

    # -- parts -----------------------------------------------------------------------------------------------

    def saver_for(self, path: str, storage_options: Mapping[str, Any] | None = None) -> BackgroundSaver:
        """Return the saver. At the first call its home is that of the options, or the one beside a path."""
        if self._saver is None:
            self.home = self.home or home_beside(folder_of(path))
            self._saver = BackgroundSaver(HomePlace(self.home, storage_options or {}), self._memory)
            weakref.finalize(self, self._saver.close)
        elif storage_options:
            self._saver.place = HomePlace(self._saver.place.home, storage_options)
        return self._saver

    def _existing_saver(self, path: str) -> BackgroundSaver | None:
        """Return the saver of a loaded file, if there is a home that may hold it."""
        has_home = self._saver is not None or self.home or Path(home_beside(folder_of(path))).is_dir()
        return self.saver_for(path) if has_home else None

    def _verify(self, path: str) -> FileId | None:
        """Return the checkpoint that a local file was written from; None if it is not Holdfast's.

        A missing or damaged file is written again from the home.
        """
        damage: Corrupt | None = None
        if Path(path).is_file():
            try:
                return verify_ckpt(Path(path))
            except Corrupt as error:
                damage = error
        saver = self._existing_saver(path)
        if saver is not None and saver.write_again(path):
            if damage is not None:
                warn(f"{damage} It was written again from {saver.place.home}.", SaveWarning)
            return verify_ckpt(Path(path))
        if damage is not None:
            raise Corrupt(
                f"{damage} It was not loaded, and its checkpoint is no longer in the home. Resume from "
                'another file, or with ckpt_path="last", which takes the newest one that verifies.',
                key=path,
            )
        return None

    def _load_remote(self, url: str, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
        options = {} if self._saver is None else self._saver.place.storage_options
        fs, name = url_to_fs(url, **options)
        if not fs.exists(name):
            raise FileNotFoundError(f"Checkpoint file not found: {url}")
        with temporary_folder("lightning") as folder:
            local = Path(folder) / "file.ckpt"
            fs.get_file(name, str(local))
            verify_ckpt(local)
            return super().load_checkpoint(local, map_location, weights_only)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options: a copy in another process opens the home by itself."""
        return {**vars(self), "_saver": None}


def _integer(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _parse_options(given: Any, path: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or is_local(path):
        raise TypeError(
            "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported "
            "for `HoldfastCheckpointIO`, unless it is a mapping of fsspec's options for the file system of a "
            "URL. Leave it out, or make it one."
        )
    return given
