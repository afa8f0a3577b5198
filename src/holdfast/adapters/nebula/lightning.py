"""Integration with Lightning: a checkpoint I/O plugin, and a ModelCheckpoint that uses it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from holdfast.adapters.lightning.packages import ModelCheckpoint, TorchCheckpointIO
from holdfast.adapters.nebula.interface import get_checkpoint, has_session, init, session
from holdfast.adapters.nebula.tag_index import PartitionMarker, named_step
from holdfast.checkpoint.store.endpoints import check_endpoint
from holdfast.errors import InvalidInput, NotFound

PARTITION = "checkpoint"
"""Partition of the state from Lightning."""


class NebulaCheckpointIO(TorchCheckpointIO):
    """Checkpoint I/O plugin for Holdfast: `Trainer(plugins=[NebulaCheckpointIO()])`.

    A small marker file at Lightning's path refers to the checkpoint. Loading accepts markers and ordinary
    files. Each save is tagged with its global step.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint for a path.

        Args:
            checkpoint: state from Lightning.
            path: path at which Lightning expects the checkpoint.
            storage_options: `is_best`: wait until the checkpoint is in home. `persist_path`: also write it
                to this file or folder with `torch.save`.

        Blocks: for the copy; with `is_best` until the checkpoint is in home.
        """
        options = dict(storage_options or {})
        unknown = sorted(options.keys() - {"is_best", "persist_path"})
        if unknown:
            raise InvalidInput(f"storage_options may have is_best and persist_path, not {unknown}.")
        current, target = session(), Path(path).absolute()
        tag = f"global_step{checkpoint.get('global_step')}"
        tag = tag if named_step(tag) is not None else target.stem
        current.save(tag, PARTITION, checkpoint, 1, label=str(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        PartitionMarker(current.home, tag, PARTITION).write(target)
        if options.get("is_best"):
            current.flush(tag)
        if (persist_path := options.get("persist_path")) is not None:
            file = Path(persist_path)
            super().save_checkpoint(checkpoint, file / target.name if file.is_dir() else file)

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load the checkpoint of a path, verified, or an ordinary file."""
        marker = PartitionMarker.read(path)
        if marker is None:
            return super().load_checkpoint(path, *args, **kwargs)
        map_location = args[0] if args else kwargs.get("map_location", lambda storage, _: storage)
        return _load(marker, str(Path(path).absolute()), map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file at a path. The checkpoint is kept; `holdfast rm` deletes it."""
        if PartitionMarker.read(path) is not None:
            Path(path).unlink(missing_ok=True)
        else:
            super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait until everything is in home, at the end of a trainer's work."""
        super().teardown()
        if has_session():
            session().flush()


class NebulaCallback(ModelCheckpoint):
    """ModelCheckpoint that saves with Holdfast: it begins the session and adds NebulaCheckpointIO.

    Args:
        args: arguments of ModelCheckpoint.
        config_params: arguments of `init` by name; None to use the environment.
        kwargs: keyword arguments of ModelCheckpoint.
    """

    def __init__(self, *args: Any, config_params: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        init(**(config_params or {}))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Set the trainer's checkpoint I/O plugin."""
        if not isinstance(trainer.strategy.checkpoint_io, NebulaCheckpointIO):
            trainer.strategy.checkpoint_io = NebulaCheckpointIO()
        super().setup(trainer, pl_module, stage)


def _load(marker: PartitionMarker, label: str, map_location: Any) -> Any:
    """Load the newest checkpoint of a path. If the file was moved, load the newest of its tag."""
    if not has_session() or session().home != marker.home:
        check_endpoint(marker.home, f"The file {label}")
    current = session(marker.home)
    for tagged in current.index(marker.home).checkpoints():
        if tagged.meta(0).label == label and tagged.tag == marker.tag:
            return current.load(tagged, marker.partition, map_location)
    found = get_checkpoint(marker.tag, marker.home)
    if found is None:
        raise NotFound(
            f"{label} refers to {marker.tag} in {marker.home}, which does not exist any more.", key=marker.tag
        )
    return found.load(marker.partition, map_location)
