"""Arenas and the copy that does not stop training."""

from holdfast.stage.arena import Arena, Arenas
from holdfast.stage.plan import Plan
from holdfast.stage.scalar import Coming, take
from holdfast.stage.stager import Stager, Staging

__all__ = ["Arena", "Arenas", "Coming", "Plan", "Stager", "Staging", "take"]
