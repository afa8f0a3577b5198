"""Lightning's front doors to Nebula: a checkpoint I/O plugin, and ModelCheckpoint that brings it along."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from holdfast.adapters.nebula.current import has_session, init, session, session_for
from holdfast.adapters.nebula.interface import get_checkpoint
from holdfast.adapters.nebula.markers import Marker
from holdfast.adapters.nebula.tags import named_step
from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.store.endpoints import check_endpoint

PARTITION = "checkpoint"
"""The partition that holds what Lightning saves."""


def _classes() -> tuple[Any, Any]:
    """Lightning's TorchCheckpointIO and ModelCheckpoint, of whichever package is installed.

    Both packages may be there, and their classes are strangers to each other: the one that is loaded is
    meant.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    present = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not present:
        return _Missing, _Missing
    name = (loaded or present)[0]
    plugins, callbacks = (importlib.import_module(f"{name}.{part}") for part in ("plugins.io", "callbacks"))
    return plugins.TorchCheckpointIO, callbacks.ModelCheckpoint


class _Missing:
    """Stands for a class of Lightning where there is none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        message = "Neither lightning nor pytorch_lightning is installed here; pip install lightning."
        raise Unsupported(message)


_TorchCheckpointIO: Any
_ModelCheckpoint: Any
_TorchCheckpointIO, _ModelCheckpoint = _classes()


class NebulaCheckpointIO(_TorchCheckpointIO):
    """Keeps what Lightning saves in Holdfast checkpoints: `Trainer(plugins=[NebulaCheckpointIO()])`.

    At Lightning's path there is a small file that says which checkpoint is meant. What it loads may be such a
    file, or an ordinary one. Each save is tagged with its global step.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint for a path.

        Args:
            checkpoint: what Lightning has collected.
            path: where Lightning expects it.
            storage_options: `is_best`: wait until it is in home; `persist_path`: write it into a file of
                `torch.save` there too, or into one in that folder.

        Raises:
            InvalidInput, Unsupported: something in it cannot be saved, named by its key path.
            HoldfastError: this save failed, or one before it.

        Blocks: for the copy; with `is_best` until it is in home.
        """
        options = _options(storage_options)
        here, place = session(), Path(path).absolute()
        tag = _tag_of(checkpoint, place)
        here.save(tag, PARTITION, checkpoint, 1, label=str(place))
        place.parent.mkdir(parents=True, exist_ok=True)
        Marker(here.home, tag, PARTITION).write(place)
        if options.get("is_best"):
            here.flush(tag)
        if (persist_path := options.get("persist_path")) is not None:
            file = Path(persist_path)
            super().save_checkpoint(checkpoint, file / place.name if file.is_dir() else file)

    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """What was saved for a path, verified; or what an ordinary file holds.

        Raises:
            NotFound: there is neither.
            Corrupt: damage was found.
        """
        marker = Marker.read(path)
        if marker is None:
            return super().load_checkpoint(path, *args, **kwargs)
        map_location = args[0] if args else kwargs.get("map_location", lambda storage, _: storage)
        return _load(marker, str(Path(path).absolute()), map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove what stands at a path; the checkpoint itself stays, see `holdfast rm`."""
        if Marker.read(path) is not None:
            Path(path).unlink(missing_ok=True)
        else:
            super().remove_checkpoint(path)

    def teardown(self) -> None:
        """At the end of a trainer's work: wait until everything is in home."""
        super().teardown()
        if has_session():
            session().flush()


class NebulaCallback(_ModelCheckpoint):
    """ModelCheckpoint that saves through Holdfast: it begins the session and brings NebulaCheckpointIO along.

    Args:
        args: as for ModelCheckpoint.
        config_params: as for `init`, by name; None: as the environment says.
        kwargs: as for ModelCheckpoint.
    """

    def __init__(self, *args: Any, config_params: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        init(**(config_params or {}))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the trainer save through Holdfast."""
        if not isinstance(trainer.strategy.checkpoint_io, NebulaCheckpointIO):
            trainer.strategy.checkpoint_io = NebulaCheckpointIO()
        super().setup(trainer, pl_module, stage)


def _options(given: Any) -> dict[str, Any]:
    options = dict(given or {})
    unknown = sorted(options.keys() - {"is_best", "persist_path"})
    if unknown:
        message = f"storage_options knows is_best and persist_path, not {unknown}."
        raise InvalidInput(message)
    return options


def _tag_of(checkpoint: dict[str, Any], place: Path) -> str:
    step = checkpoint.get("global_step")
    tag = f"global_step{step}" if isinstance(step, int) else place.stem
    return tag if named_step(tag) is not None else place.stem


def _load(marker: Marker, label: str, map_location: Any) -> Any:
    """The newest checkpoint that was saved for a path; after it was moved, the newest of its tag."""
    if not has_session() or session().home != marker.home:
        check_endpoint(marker.home, f"The file {label}")
    here = session_for(marker.home)
    for volume in here.shelf(marker.home).volumes():
        if volume.label == label and volume.tag == marker.tag:
            return here.load(volume, marker.partition, map_location)
    found = get_checkpoint(marker.tag, marker.home)
    if found is None:
        message = f"{label} stands for {marker.tag} in {marker.home}, which is not there any more."
        raise NotFound(message, key=marker.tag)
    return found.load(marker.partition, map_location)
