"""Staging: copies of a state into shared memory, without stopping training."""

from holdfast.checkpoint.stage.arena import Arena, Arenas
from holdfast.checkpoint.stage.device_copies import PendingScalar, copy_scalar
from holdfast.checkpoint.stage.plan import WITNESS_ALIGNMENT, SavePlan
from holdfast.checkpoint.stage.stager import Stager, Staging

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
