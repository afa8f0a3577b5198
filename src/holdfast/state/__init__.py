"""Training objects <-> named tensors and values: what a checkpoint holds, and how it comes back."""

from holdfast.state.assignment import assign
from holdfast.state.capture import Captured
from holdfast.state.listing import catalog_of
from holdfast.state.live import State
from holdfast.state.load import Load, Target
from holdfast.state.optimizers import stepping
from holdfast.state.sharding import Sharding, local_of, sharding_of
from holdfast.state.spread import per_rank, replicated
from holdfast.state.tensors import dtype_name, torch_dtype

__all__ = [
    "Captured",
    "Load",
    "Sharding",
    "State",
    "Target",
    "assign",
    "catalog_of",
    "dtype_name",
    "local_of",
    "per_rank",
    "replicated",
    "sharding_of",
    "stepping",
    "torch_dtype",
]
