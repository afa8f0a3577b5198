"""Watch of spikes: what is done when the recorded loss, or norm of gradients, is far above usual values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from typing_extensions import override

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.watch import Act, CopiedSave, RestoredState, Vote, Watch, WatchedRun
from holdfast.errors import InvalidInput
from holdfast.system.log import get_logger
from holdfast.watch.spike.detector import NUM_RECENT, WINDOW, SpikeDetectors

SPIKE_ACTIONS = ("report", "rollback", "off")
"""Responses to a spike of the recorded loss or norm of gradients."""
_MOST_NOTICED_STEPS = 16  # steps after which a spike is usually noticed, on all ranks
_MARKS = {True: Mark.AGAINST, False: Mark.FOR, None: Mark.NONE}
_log = get_logger("watch.spike")


@dataclass
class Spike(Watch):
    """Response to a spike of the recorded loss, or of the norm of gradients.

    Args:
        action: "report" it; "rollback": also go back to the newest healthy checkpoint before it, and leave
            out the samples since then; "off" to do neither.
        max_rollbacks: rollbacks in a row, without a healthy checkpoint after the last spike; one more and
            the run raises `Diverged`.
        back: least number of steps between the checkpoint and the first high value.
        skip: steps whose samples are left out after those of the spike too. The range doubles with each
            further rollback in a row.

    Raises:
        InvalidInput: a value cannot be used.

    Source: "rollback" is the recipe of PaLM (arXiv 2204.02311): go back about 100 steps, and skip the
        batches around the spike.
    """

    name: ClassVar[str] = "spike"
    events: ClassVar[Mapping[str, str]] = {"spike": "a recorded metric is high; the detail has its value"}

    action: str = "report"
    _: KW_ONLY
    max_rollbacks: int = 3
    back: int = 20
    skip: int = 0

    def __post_init__(self) -> None:
        if self.action not in SPIKE_ACTIONS:
            raise InvalidInput(
                f"Spike(action=) must be one of {', '.join(SPIKE_ACTIONS)}, got {self.action!r:.100}."
            )
        for name, least in {"max_rollbacks": 1, "back": 0, "skip": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(f"Spike({name}=) must be a whole number from {least}, got {value!r:.100}.")

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.action != "off"

    @property
    @override
    def goes_back(self) -> int | None:
        # The newest checkpoint may be of a step of the spike, which is noticed only after some.
        return self.back + _MOST_NOTICED_STEPS if self.action == "rollback" else None

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run = run
        self._detectors = SpikeDetectors()
        self._reported: int | None = None  # first step of the present spike

    @override
    def restored(self, state: RestoredState) -> None:
        self._reported = None
        if state.is_rollback:  # values before it still count
            self._detectors.go_back()
            return
        self._detectors = SpikeDetectors()
        if self._run.rank == 0:
            for step, values in state.values_before(WINDOW + NUM_RECENT).items():
                self._detectors.observe(step, values)

    @override
    def recorded(self, step: int, values: Mapping[str, float]) -> None:
        self._detectors.observe(step, values)

    @override
    def step(self, step: int) -> Vote | None:
        first, trend = self._detectors.spike, self._detectors.trend()
        if first is None or trend is None:
            self._reported = None
            return None
        if self._reported is None:
            self._reported = first.step
            self._run.note("spike", step=first.step, detail=trend.detail)
            if self.action == "report":
                _log.warning('SPIKE: %s. Nothing was done (Spike("report")).', trend.detail)
        if self.action != "rollback":
            return None
        upto, most = first.step - 1 - self.back, self.max_rollbacks
        return Vote(Act.GO_BACK, trend.detail, since=first.step, upto=upto, most=most, skip=self.skip)

    @override
    def saving(self, save: CopiedSave) -> Section | None:
        trend = self._detectors.trend()
        if trend is not None:
            return Section(1, {"is_spiking": trend.is_spiking}, _MARKS[trend.is_spiking], (trend.detail,))
        return Section(1, {}, Mark.NONE, ("no loss was recorded",)) if self._run.rank == 0 else None
