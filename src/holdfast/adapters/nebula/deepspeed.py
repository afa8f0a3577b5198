"""DeepSpeed's `"nebula"` block: a checkpoint engine in place of Nebula's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import fields

from holdfast.adapters.nebula.interface import Checkpoint, get_checkpoint, get_latest_checkpoint, init
from holdfast.adapters.nebula.tag_index import EXPLICIT, PartitionMarker
from holdfast.adapters.nebula.tag_writer import parse_location
from holdfast.checkpoint.exchange.torch_files import load
from holdfast.errors import InvalidInput, NotFound, Unsupported

_PACKAGE = "torch_nebula"
_ENGINES = "deepspeed.runtime.checkpoint_engine"
_BLOCK = "nebula"
_RENAMED = {"nebula_load_path": "load_path"}
_NEWEST = (None, "latest", "latest_universal")


_CheckpointEngine: Any = object  # without DeepSpeed
if importlib.util.find_spec("deepspeed") is not None:
    _CheckpointEngine = importlib.import_module(f"{_ENGINES}.checkpoint_engine").CheckpointEngine


def use_for_deepspeed() -> None:
    """Use Holdfast for DeepSpeed configurations with `"nebula": {"enabled": true, ...}`.

    Call it before `deepspeed.initialize`. Versions of DeepSpeed that support the block import a package
    `torch_nebula` and have an engine for it. This function installs Holdfast's interface under that name
    and replaces the engine. Later versions refuse the block; this function adds it again.
    """
    if _CheckpointEngine is object:
        raise Unsupported("DeepSpeed is not installed: pip install deepspeed.")
    sys.modules.setdefault(_PACKAGE, importlib.import_module("holdfast.adapters.nebula"))
    module = f"{_ENGINES}.nebula_checkpoint_engine"
    if importlib.util.find_spec(module) is not None:
        engines: Any = importlib.import_module(module)
        engines.NebulaCheckpointEngine = HoldfastCheckpointEngine
    else:
        _restore_block()


def _restore_block() -> None:
    """Add the block to a version of DeepSpeed that has dropped it."""
    config: Any = importlib.import_module("deepspeed.runtime.config")
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}).pop(_BLOCK, None)
    make = engine.create_checkpoint_engine
    if getattr(make, "__module__", "") == __name__:
        return

    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        block = (getattr(config_params, "_param_dict", None) or {}).get(_BLOCK) or {}
        if block.get("enabled"):
            return HoldfastCheckpointEngine(NebulaBlock.parse(block))
        return make(config_params, *args, **kwargs)

    engine.create_checkpoint_engine = create_checkpoint_engine


class NebulaBlock(Struct, frozen=True):
    """`"nebula"` block of DeepSpeed's configuration, with its defaults."""

    persistent_storage_path: str | None = None
    persistent_time_interval: float = 100
    num_of_version_in_retention: int = 2
    enable_nebula_load: bool = True
    load_path: str | None = None

    @classmethod
    def parse(cls, block: Mapping[str, Any]) -> NebulaBlock:
        """Parse the block of a configuration."""
        given = {_RENAMED.get(name, name): value for name, value in block.items() if name != "enabled"}
        names = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - names):
            raise InvalidInput(
                f"The nebula block of DeepSpeed's configuration cannot have {unknown}. It can have "
                f"{sorted(names)}.",
                key=unknown[0],
            )
        return cls(**given)


class HoldfastCheckpointEngine(_CheckpointEngine):
    """Checkpoint engine that saves the files of all ranks as one checkpoint per tag.

    Small marker files at DeepSpeed's own paths refer to the state, because DeepSpeed searches for them.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        home = config_params.persistent_storage_path
        interval_s = config_params.persistent_time_interval
        init(home, interval_s, config_params.num_of_version_in_retention)
        self._home = parse_location(home)
        self._load_path = config_params.load_path or home
        self._reads_here = bool(config_params.enable_nebula_load)
        self._first_tag: str | None = None
        self._checkpoint: Checkpoint | None = None

    def create(self, info: Any) -> None:
        """Begin a checkpoint. `info` is a tag, or has an attribute `tag`."""
        self._checkpoint = Checkpoint(str(getattr(info, "tag", info)), EXPLICIT)

    def save(self, state_dict: Any, path: str) -> None:
        """Save the state for `path`. Files without a tag, such as a 16-bit model, are saved with torch."""
        file, checkpoint = Path(path), self._checkpoint
        if checkpoint is None or file.parent.name != checkpoint.tag:
            torch.save(state_dict, path)
            return
        checkpoint.save(file.name, state_dict)
        PartitionMarker(self._home, checkpoint.tag, file.name).write(file)

    def commit(self, info: Any) -> bool:
        """Complete the current checkpoint."""
        checkpoint = self._checkpoint
        return checkpoint is not None and checkpoint.commit()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load the state for `path`: from its tag, the newest checkpoint, or a file of torch."""
        file = Path(path)
        tag = file.parent.name
        is_first = self._first_tag in (None, tag)
        if file.is_file() and PartitionMarker.read(file) is None and (not self._reads_here and is_first):
            self._first_tag = tag
            return load(file, map_location=map_location, mmap=False)
        checkpoint = self._find(tag)
        if checkpoint is None:
            raise NotFound(
                f"{self._load_path} and the nearer tiers have no checkpoint {tag!r}, and no other one.",
                key=tag,
            )
        self._first_tag = ""
        return checkpoint.load(file.name, map_location)

    def _find(self, tag: str) -> Checkpoint | None:
        found = None if tag in _NEWEST else get_checkpoint(tag, self._load_path)
        for search in (lambda: get_latest_checkpoint(self._load_path), get_latest_checkpoint):
            if found is not None and found.tag:
                return found
            found = search()
        return found if found is not None and found.tag else None
