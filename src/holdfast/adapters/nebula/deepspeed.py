"""DeepSpeed's `"nebula"` block: a checkpoint engine that DeepSpeed takes for Nebula's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.nebula.current import init
from holdfast.adapters.nebula.handle import Checkpoint
from holdfast.adapters.nebula.interface import get_checkpoint, get_latest_checkpoint
from holdfast.adapters.nebula.markers import Marker
from holdfast.adapters.nebula.settings import place_of
from holdfast.adapters.nebula.tags import EXPLICIT
from holdfast.errors import InvalidInput, NotFound, Unsupported
from holdfast.exchange.torch_files import load

_ASKED_FOR = "torch_nebula"
_ENGINES = "deepspeed.runtime.checkpoint_engine"
_BLOCK = "nebula"
_RENAMED = {"nebula_load_path": "load_path"}
_NEWEST = (None, "latest", "latest_universal")


def _engine_class() -> Any:
    """DeepSpeed's own base of all engines; without DeepSpeed, a class that does nothing."""
    if importlib.util.find_spec("deepspeed") is None:
        return object
    return importlib.import_module(f"{_ENGINES}.checkpoint_engine").CheckpointEngine


_CheckpointEngine: Any = _engine_class()


def use_for_deepspeed() -> None:
    """Have DeepSpeed use Holdfast where its configuration says `"nebula": {"enabled": true, ...}`.

    To be called before `deepspeed.initialize`. Versions of DeepSpeed that know the block import a package
    `torch_nebula` and have an engine for it: that name is bound to Nebula's interface as Holdfast has it,
    and the engine is replaced by the one below. Later versions refuse the block: they are made to take it
    again.

    Raises:
        Unsupported: there is no DeepSpeed.
    """
    if _CheckpointEngine is object:
        message = "DeepSpeed is not installed here; pip install deepspeed."
        raise Unsupported(message)
    sys.modules.setdefault(_ASKED_FOR, importlib.import_module("holdfast.adapters.nebula"))
    place = f"{_ENGINES}.nebula_checkpoint_engine"
    if importlib.util.find_spec(place) is not None:
        engines: Any = importlib.import_module(place)
        engines.NebulaCheckpointEngine = HoldfastCheckpointEngine
    else:
        _bring_back()


def _bring_back() -> None:
    """Have a DeepSpeed that has dropped the block take it again."""
    config: Any = importlib.import_module("deepspeed.runtime.config")
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}).pop(_BLOCK, None)
    make = engine.create_checkpoint_engine
    if getattr(make, "__module__", "") == __name__:
        return

    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        block = (getattr(config_params, "_param_dict", None) or {}).get(_BLOCK) or {}
        if block.get("enabled"):
            return HoldfastCheckpointEngine(Block.read(block))
        return make(config_params, *args, **kwargs)

    engine.create_checkpoint_engine = create_checkpoint_engine


@dataclass(frozen=True, slots=True)
class Block:
    """The `"nebula"` block, with its defaults."""

    persistent_storage_path: str | None = None
    persistent_time_interval: float = 100
    num_of_version_in_retention: int = 2
    enable_nebula_load: bool = True
    load_path: str | None = None

    @classmethod
    def read(cls, block: Mapping[str, Any]) -> Block:
        """The block in a configuration.

        Raises:
            InvalidInput: it has a member that the block does not have.
        """
        given = {_RENAMED.get(name, name): value for name, value in block.items() if name != "enabled"}
        known = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - known):
            message = (
                f"The nebula block of DeepSpeed's configuration has no {unknown}; it has {sorted(known)}."
            )
            raise InvalidInput(message, key=unknown[0])
        return cls(**given)


class HoldfastCheckpointEngine(_CheckpointEngine):
    """Saves what DeepSpeed's ranks hand it as one checkpoint per tag, and loads it verified.

    At DeepSpeed's own paths there are small files that say where the state is: DeepSpeed looks for them.

    Args:
        config_params: the block: a `Block`, or what DeepSpeed has made of it.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        home = config_params.persistent_storage_path
        interval_s = config_params.persistent_time_interval
        init(home, interval_s, config_params.num_of_version_in_retention)
        self._home = place_of(home)
        self._load_path = config_params.load_path or home
        self._reads_here = bool(config_params.enable_nebula_load)
        self._first_tag: str | None = None
        self._checkpoint: Checkpoint | None = None

    def create(self, info: Any) -> None:
        """Begin a checkpoint; `info` is a tag, or has one."""
        self._checkpoint = Checkpoint(_tag_of(info), EXPLICIT)

    def save(self, state_dict: Any, path: str) -> None:
        """Take what is to stand at `path`; what belongs to no tag, a 16-bit model, is saved with torch.

        Raises:
            InvalidInput, Unsupported: something in it cannot be saved, named by its key path.
            HoldfastError: this save failed, or one before it.
        """
        place, checkpoint = Path(path), self._checkpoint
        if checkpoint is None or place.parent.name != checkpoint.tag:
            torch.save(state_dict, path)
            return
        checkpoint.save(place.name, state_dict)
        Marker(self._home, checkpoint.tag, place.name).write(place)

    def commit(self, info: Any) -> bool:
        """Complete the checkpoint that was begun."""
        checkpoint = self._checkpoint
        return checkpoint is not None and checkpoint.commit()

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved for `path`: of its tag, else of the newest checkpoint; or a file of torch's.

        Raises:
            NotFound: there is none.
            Corrupt: damage was found.
            Unsupported: loading the file of torch's could run code.
        """
        place = Path(path)
        tag = place.parent.name
        is_first = self._first_tag in (None, tag)
        if place.is_file() and Marker.read(place) is None and (not self._reads_here and is_first):
            self._first_tag = tag
            return load(place, map_location=map_location, mmap=False)
        checkpoint = self._find(tag)
        if checkpoint is None:
            message = f"There is no checkpoint {tag!r} in {self._load_path} or nearer, and no other one."
            raise NotFound(message, key=tag)
        self._first_tag = ""
        return checkpoint.load(place.name, map_location)

    def _find(self, tag: str) -> Checkpoint | None:
        found = None if tag in _NEWEST else get_checkpoint(tag, self._load_path)
        for search in (lambda: get_latest_checkpoint(self._load_path), get_latest_checkpoint):
            if found is not None and found.tag:
                return found
            found = search()
        return found if found is not None and found.tag else None


def _tag_of(info: Any) -> str:
    return str(getattr(info, "tag", info))
