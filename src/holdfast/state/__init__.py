"""Training objects as named tensors and values: captured for a checkpoint, and restored from one."""

from holdfast.state.assignment import assign
from holdfast.state.audit_turns import AuditTurns, audit_turns
from holdfast.state.capture import CapturedState
from holdfast.state.catalog import catalog_of
from holdfast.state.load import Load
from holdfast.state.optimizers import stepping
from holdfast.state.replication import per_rank, replicated
from holdfast.state.sharding import Sharding, local_of, sharding_of
from holdfast.state.skippable import Skippable
from holdfast.state.training_objects import State

__all__ = [
    "AuditTurns",
    "CapturedState",
    "Load",
    "Sharding",
    "Skippable",
    "State",
    "assign",
    "audit_turns",
    "catalog_of",
    "local_of",
    "per_rank",
    "replicated",
    "sharding_of",
    "stepping",
]
