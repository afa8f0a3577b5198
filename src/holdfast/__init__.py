"""Holdfast keeps a PyTorch training run going.

It saves without stopping the training, proves every checkpoint, and brings the run back after a crash or a
preemption from the newest checkpoint that verifies.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.exchange import export_checkpoint as export_checkpoint
    from holdfast.checkpoint.exchange import export_in_background as export_in_background
    from holdfast.checkpoint.exchange import import_checkpoint as import_checkpoint
    from holdfast.checkpoint.format.sections import Mark as Mark
    from holdfast.checkpoint.format.sections import Section as Section
    from holdfast.checkpoint.keeper.save import Save as Save
    from holdfast.checkpoint.keeper.watch import KeeperWatch as KeeperWatch
    from holdfast.checkpoint.policy import Every as Every
    from holdfast.checkpoint.policy import EveryAuto as EveryAuto
    from holdfast.checkpoint.policy import EverySteps as EverySteps
    from holdfast.checkpoint.policy import EveryTime as EveryTime
    from holdfast.checkpoint.ranks import RankGroup as RankGroup
    from holdfast.checkpoint.restore.checkpoint import Checkpoint as Checkpoint
    from holdfast.checkpoint.restore.checkpoint import open as open
    from holdfast.checkpoint.retention import Keep as Keep
    from holdfast.checkpoint.run import Checkpointer as Checkpointer
    from holdfast.checkpoint.run.options import Home as Home
    from holdfast.checkpoint.run.options import Limits as Limits
    from holdfast.checkpoint.run.options import Local as Local
    from holdfast.checkpoint.run.options import Memory as Memory
    from holdfast.checkpoint.run.options import Peers as Peers
    from holdfast.checkpoint.run.options import Reads as Reads
    from holdfast.checkpoint.state import per_rank as per_rank
    from holdfast.checkpoint.state import replicated as replicated
    from holdfast.checkpoint.store import open_store as open_store
    from holdfast.checkpoint.watch import Act as Act
    from holdfast.checkpoint.watch import Vote as Vote
    from holdfast.checkpoint.watch import Watch as Watch
    from holdfast.errors import Conflict as Conflict
    from holdfast.errors import Corrupt as Corrupt
    from holdfast.errors import Denied as Denied
    from holdfast.errors import Diverged as Diverged
    from holdfast.errors import HoldfastError as HoldfastError
    from holdfast.errors import Internal as Internal
    from holdfast.errors import InvalidInput as InvalidInput
    from holdfast.errors import NotFound as NotFound
    from holdfast.errors import Preempted as Preempted
    from holdfast.errors import ResumeWarning as ResumeWarning
    from holdfast.errors import RetryLater as RetryLater
    from holdfast.errors import SaveWarning as SaveWarning
    from holdfast.errors import Unsupported as Unsupported
    from holdfast.errors import WatchWarning as WatchWarning
    from holdfast.jobs.writeback import mount as mount
    from holdfast.system.process_exit import hard_exit as hard_exit
    from holdfast.train.batch import BatchFit as BatchFit
    from holdfast.train.batch import fit_batch as fit_batch
    from holdfast.train.sharding.inspection import describe as describe
    from holdfast.train.sharding.shard import shard as shard
    from holdfast.watch.compiled.trainer import CompileCache as CompileCache
    from holdfast.watch.defaults import default_watches as default_watches
    from holdfast.watch.hang.watch import Hang as Hang
    from holdfast.watch.memory import HostMemory as HostMemory
    from holdfast.watch.pace.watch import SlowRanks as SlowRanks
    from holdfast.watch.preemption.trainer import Preemption as Preemption
    from holdfast.watch.replicas import Replicas as Replicas
    from holdfast.watch.spike import Spike as Spike
    from holdfast.watch.standby.prebuilt import prebuild as prebuild
    from holdfast.watch.standby.supervisor import supervise as supervise
    from holdfast.watch.values import FiniteValues as FiniteValues

_NAMES = {
    "checkpoint.exchange": "export_checkpoint export_in_background import_checkpoint",
    "checkpoint.format.sections": "Mark Section",
    "checkpoint.keeper.save": "Save",
    "checkpoint.keeper.watch": "KeeperWatch",
    "checkpoint.policy": "Every EveryAuto EverySteps EveryTime",
    "checkpoint.ranks": "RankGroup",
    "checkpoint.restore.checkpoint": "Checkpoint open",
    "checkpoint.retention": "Keep",
    "checkpoint.run": "Checkpointer",
    "checkpoint.run.options": "Home Limits Local Memory Peers Reads",
    "checkpoint.state": "per_rank replicated",
    "checkpoint.store": "open_store",
    "checkpoint.watch": "Act Vote Watch",
    "errors": (
        "Conflict Corrupt Denied Diverged HoldfastError Internal InvalidInput "
        "NotFound Preempted ResumeWarning RetryLater SaveWarning Unsupported WatchWarning"
    ),
    "jobs.writeback": "mount",
    "system.process_exit": "hard_exit",
    "train.batch": "BatchFit fit_batch",
    "train.sharding.inspection": "describe",
    "train.sharding.shard": "shard",
    "watch.compiled.trainer": "CompileCache",
    "watch.defaults": "default_watches",
    "watch.hang.watch": "Hang",
    "watch.memory": "HostMemory",
    "watch.pace.watch": "SlowRanks",
    "watch.preemption.trainer": "Preemption",
    "watch.replicas": "Replicas",
    "watch.standby.supervisor": "supervise",
    "watch.standby.prebuilt": "prebuild",
    "watch.spike": "Spike",
    "watch.values": "FiniteValues",
}
"""Public names by the module that has them."""
_PLACES = {name: place for place, names in _NAMES.items() for name in names.split()}

__version__ = "0.1.0"
# Type checkers read the aliases above.
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import holdfast` stays light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if sys.platform == "win32" and _PLACES[name] != "errors":
        importlib.import_module("holdfast.system.environment").require_linux(name)
    return getattr(importlib.import_module(f"holdfast.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, which is what completion offers."""
    return __all__
