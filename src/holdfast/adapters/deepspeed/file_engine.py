"""Checkpoint engine of DeepSpeed for the files of a save and of a load."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from holdfast.adapters.deepspeed.resharding import ReshardedFiles
from holdfast.adapters.deepspeed.saved_files import SavedFiles, name_in, pack_file
from holdfast.checkpoint.exchange.packed_value import Packed
from holdfast.system.linux.partial_files import temporary_folder


class FileEngine(CheckpointEngine):
    """Checkpoint engine in place of DeepSpeed's, which still writes files without a tag.

    Args:
        stock: engine that DeepSpeed has chosen.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__(None)
        self.name = "HoldfastCheckpointEngine"
        self.stock = stock
        self._on_commit: Callable[[Any, dict[str, Packed]], None] | None = None
        self._folder: str | None = None  # of the tag that is being saved
        self._files: dict[str, Packed] = {}
        self._source: tuple[str, SavedFiles | ReshardedFiles] | None = None

    @contextlib.contextmanager
    def collecting(self, on_commit: Callable[[Any, dict[str, Packed]], None]) -> Iterator[None]:
        """Collect the files of a save, and pass them on when DeepSpeed completes it."""
        self._on_commit = on_commit
        try:
            yield
        finally:
            self._on_commit, self._folder, self._files = None, None, {}

    @contextlib.contextmanager
    def returning(self, source: SavedFiles | ReshardedFiles) -> Iterator[str]:
        """Yield a folder with an empty file for each file of a checkpoint.

        DeepSpeed looks for the names there. The files are empty, since it loads them through this engine.
        """
        with temporary_folder("deepspeed") as folder:
            tagged = folder / source.facts.tag
            for name in source.owners:
                (tagged / name).parent.mkdir(parents=True, exist_ok=True)
                (tagged / name).touch()
            self._source = (str(tagged), source)
            try:
                yield str(folder)
            finally:
                self._source = None

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        if self._on_commit is None:
            self.stock.create(info)
        else:
            self._folder = os.path.join(info.save_dir, info.tag)  # noqa: PTH118 - as DeepSpeed makes its paths

    def save(self, state_dict: Any, path: str) -> None:
        """Collect the content of a file; write what does not belong to a tag."""
        name = None if self._folder is None else name_in(self._folder, path)
        if name is None:
            self.stock.save(state_dict, path)
        else:
            self._files[name] = pack_file(state_dict, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load a file of the current checkpoint to the CPU, or one that DeepSpeed wrote."""
        if self._source is not None:
            folder, source = self._source
            name = name_in(folder, path)
            if name is not None:
                return source.load(name)
        return self.stock.load(path, map_location)

    def commit(self, info: Any) -> bool:
        """Complete a checkpoint."""
        if self._on_commit is None:
            return self.stock.commit(info)
        self._on_commit(info, self._files)
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: only the elements of a tensor are saved, not all of its storage."""
        return False
