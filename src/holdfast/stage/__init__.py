"""Staging: copies of a state into shared memory, without stopping training."""

from holdfast.stage.arena import Arena, Arenas
from holdfast.stage.plan import WITNESS_ALIGNMENT, SavePlan
from holdfast.stage.scalar import PendingScalar, copy_scalar
from holdfast.stage.stager import Stager, Staging

__all__ = [
    "WITNESS_ALIGNMENT",
    "Arena",
    "Arenas",
    "PendingScalar",
    "SavePlan",
    "Stager",
    "Staging",
    "copy_scalar",
]
