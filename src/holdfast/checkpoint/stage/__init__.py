"""Staging: copies of a state into shared memory, without stopping training."""

from holdfast.checkpoint.stage.arena import Arena, Arenas
from holdfast.checkpoint.stage.device_copies import PendingScalar, copy_scalar
from holdfast.checkpoint.stage.plan import SavePlan, aligned
from holdfast.checkpoint.stage.stager import Stager, Staging

__all__ = ["Arena", "Arenas", "PendingScalar", "SavePlan", "Stager", "Staging", "aligned", "copy_scalar"]
