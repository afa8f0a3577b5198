"""Holdfast keeps a PyTorch training run going.

It saves without stopping the training, proves every checkpoint, and brings the run back after a crash or a
preemption from the newest checkpoint that verifies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.exchange import export_checkpoint, export_in_background, import_checkpoint
    from holdfast.checkpoint.format.sections import Mark, Section
    from holdfast.checkpoint.keeper.save import Save
    from holdfast.checkpoint.keeper.watch import KeeperWatch
    from holdfast.checkpoint.policy import Every, EveryAuto, EverySteps, EveryTime
    from holdfast.checkpoint.ranks import RankGroup
    from holdfast.checkpoint.restore.checkpoint import Checkpoint, open
    from holdfast.checkpoint.retention import Keep
    from holdfast.checkpoint.run import Checkpointer
    from holdfast.checkpoint.run.options import (
        Home,
        Limits,
        Local,
        Memory,
        Reads,
    )
    from holdfast.checkpoint.state import per_rank, replicated
    from holdfast.checkpoint.store import open_store
    from holdfast.checkpoint.watch import Act, Vote, Watch
    from holdfast.errors import (
        Conflict,
        Corrupt,
        Denied,
        Diverged,
        HoldfastError,
        Internal,
        InvalidInput,
        NotFound,
        Preempted,
        ResumeWarning,
        RetryLater,
        SaveWarning,
        Unsupported,
        WatchWarning,
    )
    from holdfast.jobs.writeback import mount
    from holdfast.system.process_exit import hard_exit
    from holdfast.train.batch import BatchFit, fit_batch
    from holdfast.train.sharding.inspection import describe
    from holdfast.train.sharding.shard import shard
    from holdfast.train.tuning.step_profile import tune
    from holdfast.watch.compiled.trainer import CompileCache
    from holdfast.watch.defaults import default_watches
    from holdfast.watch.hang.trainer import Hang
    from holdfast.watch.memory import HostMemory
    from holdfast.watch.pace.trainer import SlowRanks
    from holdfast.watch.preemption.trainer import Preemption
    from holdfast.watch.replicas.trainer import Replicas
    from holdfast.watch.spike import Spike
    from holdfast.watch.values.trainer import FiniteValues

_PLACES = {
    "Act": "checkpoint.watch",
    "BatchFit": "train.batch",
    "Checkpoint": "checkpoint.restore.checkpoint",
    "Checkpointer": "checkpoint.run",
    "CompileCache": "watch.compiled.trainer",
    "Conflict": "errors",
    "Corrupt": "errors",
    "Denied": "errors",
    "Diverged": "errors",
    "Every": "checkpoint.policy",
    "EveryAuto": "checkpoint.policy",
    "EverySteps": "checkpoint.policy",
    "EveryTime": "checkpoint.policy",
    "FiniteValues": "watch.values.trainer",
    "Hang": "watch.hang.trainer",
    "HoldfastError": "errors",
    "Home": "checkpoint.run.options",
    "HostMemory": "watch.memory",
    "Internal": "errors",
    "InvalidInput": "errors",
    "Keep": "checkpoint.retention",
    "KeeperWatch": "checkpoint.keeper.watch",
    "Limits": "checkpoint.run.options",
    "Local": "checkpoint.run.options",
    "Mark": "checkpoint.format.sections",
    "Memory": "checkpoint.run.options",
    "NotFound": "errors",
    "Preempted": "errors",
    "Preemption": "watch.preemption.trainer",
    "RankGroup": "checkpoint.ranks",
    "Reads": "checkpoint.run.options",
    "Replicas": "watch.replicas.trainer",
    "ResumeWarning": "errors",
    "RetryLater": "errors",
    "Save": "checkpoint.keeper.save",
    "SaveWarning": "errors",
    "Section": "checkpoint.format.sections",
    "SlowRanks": "watch.pace.trainer",
    "Spike": "watch.spike",
    "Unsupported": "errors",
    "Vote": "checkpoint.watch",
    "Watch": "checkpoint.watch",
    "WatchWarning": "errors",
    "default_watches": "watch.defaults",
    "describe": "train.sharding.inspection",
    "export_checkpoint": "checkpoint.exchange",
    "export_in_background": "checkpoint.exchange",
    "fit_batch": "train.batch",
    "hard_exit": "system.process_exit",
    "import_checkpoint": "checkpoint.exchange",
    "mount": "jobs.writeback",
    "open": "checkpoint.restore.checkpoint",
    "open_store": "checkpoint.store",
    "per_rank": "checkpoint.state",
    "replicated": "checkpoint.state",
    "shard": "train.sharding.shard",
    "tune": "train.tuning.step_profile",
}

__version__ = "0.1.0"
__all__ = [
    "Act",
    "BatchFit",
    "Checkpoint",
    "Checkpointer",
    "CompileCache",
    "Conflict",
    "Corrupt",
    "Denied",
    "Diverged",
    "Every",
    "EveryAuto",
    "EverySteps",
    "EveryTime",
    "FiniteValues",
    "Hang",
    "HoldfastError",
    "Home",
    "HostMemory",
    "Internal",
    "InvalidInput",
    "Keep",
    "KeeperWatch",
    "Limits",
    "Local",
    "Mark",
    "Memory",
    "NotFound",
    "Preempted",
    "Preemption",
    "RankGroup",
    "Reads",
    "Replicas",
    "ResumeWarning",
    "RetryLater",
    "Save",
    "SaveWarning",
    "Section",
    "SlowRanks",
    "Spike",
    "Unsupported",
    "Vote",
    "Watch",
    "WatchWarning",
    "default_watches",
    "describe",
    "export_checkpoint",
    "export_in_background",
    "fit_batch",
    "hard_exit",
    "import_checkpoint",
    "mount",
    "open",
    "open_store",
    "per_rank",
    "replicated",
    "shard",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import holdfast` stays light."""
    if name not in _PLACES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(f"holdfast.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, which is what completion offers."""
    return sorted(__all__)
