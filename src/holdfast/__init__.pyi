"""Public names, and the modules that have them, for type checkers and for `__init__.py`."""

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

__all__: list[str]
__version__: str
_PLACES: dict[str, str]
