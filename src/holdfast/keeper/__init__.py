"""Process that completes saves beside the trainer: persists, commits, drains and deletes. No torch."""

from holdfast.keeper.client import Keeper, wait_for_closed
from holdfast.keeper.config import KeeperConfig
from holdfast.keeper.host_processes import find_trainers, wait_for_orphans
from holdfast.keeper.memory_store import MemoryTierStore, free_memory_tier
from holdfast.keeper.messages import ArenaLayout
from holdfast.keeper.save import Save

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
