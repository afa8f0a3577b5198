"""Process that completes saves beside the trainer: persists, commits, drains and deletes. No torch."""

from holdfast.checkpoint.keeper.client import Keeper, wait_for_closed
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.lockfile import find_trainers, wait_for_orphans
from holdfast.checkpoint.keeper.memory_store import MemoryTierStore, free_memory_tier
from holdfast.checkpoint.keeper.messages import ArenaLayout
from holdfast.checkpoint.keeper.save import Save

__all__ = [
    "ArenaLayout",
    "Keeper",
    "KeeperConfig",
    "MemoryTierStore",
    "Save",
    "find_trainers",
    "free_memory_tier",
    "wait_for_closed",
    "wait_for_orphans",
]
