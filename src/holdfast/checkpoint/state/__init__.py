"""Training objects as named tensors and values: captured for a checkpoint, and restored from one."""

from holdfast.checkpoint.state.capture import assign, catalog_of, shared_tensors
from holdfast.checkpoint.state.entry import Skippable, per_rank, replicated
from holdfast.checkpoint.state.load import Load
from holdfast.checkpoint.state.optimizers import stepping
from holdfast.checkpoint.state.sharding import Sharding, local_of, sharding_of
from holdfast.checkpoint.state.tensor_table import CapturedState
from holdfast.checkpoint.state.training_objects import State

__all__ = [
    "CapturedState",
    "Load",
    "Sharding",
    "Skippable",
    "State",
    "assign",
    "catalog_of",
    "local_of",
    "per_rank",
    "replicated",
    "sharding_of",
    "shared_tensors",
    "stepping",
]
