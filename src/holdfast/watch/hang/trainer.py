"""Hang watch: what is done when the training makes no progress, and after how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from typing_extensions import override

from holdfast.checkpoint.watch import ActionWatch, WatchedRun
from holdfast.system.documents import to_plain
from holdfast.system.units import Duration, parse_duration
from holdfast.watch.hang.limit import HangLimits
from holdfast.watch.hang.stacks import NAME, install_handlers


@dataclass
class Hang(ActionWatch):
    """Response to a training that makes no progress, and the limits of that.

    Args:
        action: "report" the stacks of all ranks; "restart": also end all ranks once their saves are durable,
            with status 63, so that a launcher starts them again; "off" to watch nothing.
        limit: longest step, such as "5m"; by default learnt from the steps before: ten times their median,
            twice the longest, and at least a minute.
        first: longest first step of a loop, which compiles and connects, and any step until the limit is
            learnt.
        phase: longest phase, such as an evaluation, a restore or a save; or ten times the longest of
            its name.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = NAME
    keeper: ClassVar[str | None] = "holdfast.watch.hang.keeper:HangKeeper"
    events: ClassVar[Mapping[str, str]] = {
        "hang": "a rank makes no progress; with the member `evidence`",
        "hang-over": "the rank makes progress again; seconds are those without",
    }

    actions: ClassVar[tuple[str, ...]] = ("report", "restart", "off")
    action: str = "report"
    _: KW_ONLY
    limit: Duration | None = None
    first: Duration = "30m"
    phase: Duration = "30m"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._limits = HangLimits(
            None if self.limit is None else parse_duration(self.limit, "Hang(limit=)"),
            parse_duration(self.first, "Hang(first=)"),
            parse_duration(self.phase, "Hang(phase=)"),
        )

    @override
    def options(self) -> Mapping[str, Any]:
        return {"restarts": self.action == "restart", "limits": to_plain(self._limits)}

    @override
    def begin(self, run: WatchedRun) -> None:
        run.words[0] = install_handlers() + 1
