"""The watches of a run that names no others, in the order of their events."""

from __future__ import annotations

from holdfast.checkpoint.watch import Watch
from holdfast.watch.compiled.trainer import CompileCache
from holdfast.watch.hang.watch import Hang
from holdfast.watch.memory import HostMemory
from holdfast.watch.pace.watch import SlowRanks
from holdfast.watch.preemption.trainer import Preemption
from holdfast.watch.replicas import Replicas
from holdfast.watch.spike import Spike
from holdfast.watch.values import FiniteValues


def default_watches() -> tuple[Watch, ...]:
    """Return the watches of a Checkpointer whose argument `watches=` names no others."""
    kinds = Preemption, CompileCache, Hang, SlowRanks, FiniteValues, Spike, Replicas, HostMemory
    return tuple(kind() for kind in kinds)
