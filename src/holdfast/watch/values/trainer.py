"""Watch of finite values: whether the tensors of each checkpoint are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.checkpoint.watch import ActionWatch


@dataclass
class FiniteValues(ActionWatch):
    """Check of each checkpoint: all tensors are finite, and their norms are within reason.

    It takes place in the keeper, while the tensors are hashed. A checkpoint that does not pass is marked as
    unhealthy; see `Checkpointer.restore`.

    Args:
        action: "mark" the checkpoint; "off" to check nothing.

    Raises:
        InvalidInput: `action` is something else.
    """

    name: ClassVar[str] = "finite-values"
    keeper: ClassVar[str | None] = "holdfast.watch.values.keeper:ValuesKeeper"

    actions: ClassVar[tuple[str, ...]] = ("mark", "off")
    action: str = "mark"
