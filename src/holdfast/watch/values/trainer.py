"""Watch of finite values: whether the tensors of each checkpoint are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from holdfast.checkpoint.watch import Watch, WatchedRun
from holdfast.errors import InvalidInput


@dataclass
class FiniteValues(Watch):
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

    action: str = "mark"

    def __post_init__(self) -> None:
        if self.action not in ("mark", "off"):
            raise InvalidInput(f"FiniteValues(action=) must be one of mark, off, got {self.action!r:.100}.")

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.action != "off"
