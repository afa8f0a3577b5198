"""Watch of spikes: what is done when the recorded loss, or norm of gradients, is far above usual values."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from msgspec import Struct
from typing_extensions import override

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.watch import Act, ActionWatch, CopiedSave, RestoredState, Vote, WatchedRun
from holdfast.errors import InvalidInput
from holdfast.system.log import get_logger

_MOST_NOTICED_STEPS = 16  # steps after which a spike is usually noticed, on all ranks
_MARKS = {True: Mark.AGAINST, False: Mark.FOR, None: Mark.NONE}
_log = get_logger("watch.spike")


@dataclass
class Spike(ActionWatch):
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

    actions: ClassVar[tuple[str, ...]] = ("report", "rollback", "off")
    action: str = "report"
    _: KW_ONLY
    max_rollbacks: int = 3
    back: int = 20
    skip: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"max_rollbacks": 1, "back": 0, "skip": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(f"Spike({name}=) must be a whole number from {least}, got {value!r:.100}.")

    @property
    @override
    def goes_back(self) -> int | None:
        # The newest checkpoint may be of a step of the spike, which is noticed only after some.
        return self.back + _MOST_NOTICED_STEPS if self.action == "rollback" else None

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run = run
        self._detectors: dict[str, SpikeDetector] = {}  # of losses and of norms of gradients, by their names
        self._reported: int | None = None  # first step of the present spike

    @override
    def restored(self, state: RestoredState) -> None:
        self._reported = None
        if state.is_rollback:  # values before it still count
            for detector in self._detectors.values():
                detector.go_back()
            return
        self._detectors.clear()
        if self._run.rank == 0:
            for step, values in state.values_before(WINDOW + NUM_RECENT).items():
                self.recorded(step, values)

    @override
    def recorded(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            detector = self._detectors.get(name)
            if detector is None:
                kind = kind_of(name)
                if kind is None or len(self._detectors) >= _MAX_METRICS:
                    continue
                detector = self._detectors[name] = SpikeDetector(name, kind)
            detector.add(step, value)

    @override
    def step(self, step: int) -> Vote | None:
        high = (one.first_high for one in self._detectors.values() if one.first_high is not None)
        since = min((value.step for value in high), default=None)
        trend = self._trend()
        if since is None or trend is None:
            self._reported = None
            return None
        if self._reported is None:
            self._reported = since
            self._run.note("spike", step=since, detail=trend.detail)
            if self.action == "report":
                _log.warning('SPIKE: %s. Nothing was done (Spike("report")).', trend.detail)
        if self.action != "rollback":
            return None
        upto, most = since - 1 - self.back, self.max_rollbacks
        return Vote(Act.GO_BACK, trend.detail, since=since, upto=upto, most=most, skip=self.skip)

    @override
    def saving(self, save: CopiedSave) -> Section | None:
        trend = self._trend()
        if trend is not None:
            return Section(1, {"is_spiking": trend.is_spiking}, _MARKS[trend.is_spiking], (trend.detail,))
        return Section(1, {}, Mark.NONE, ("no loss was recorded",)) if self._run.rank == 0 else None

    def _trend(self) -> Trend | None:
        """Return the judgement of all metrics together; None if none is watched."""
        trends = [detector.trend() for detector in self._detectors.values()]
        for outcome in (True, False, None):
            if found := [trend.detail for trend in trends if trend.is_spiking is outcome]:
                return Trend(outcome, "; ".join(found))
        return None


WINDOW = 128  # values that a new one is compared with
MIN_VALUES = 32  # values before the first judgement
NUM_RECENT, NUM_HIGH = 5, 3  # a spike is at least three high values among the last five
_Z = 8.0  # least distance of a high value from the median, in robust standard deviations
_RATIO = {"loss": 0.1, "norm": 2.0}
"""Least distance of a high value from the median, as a share of it: noise may be very small. Norms of
gradients vary much more than losses."""
_MAD_TO_DEVIATION = 1.4826
_MAX_METRICS = 8
_REFRESH = 8  # values between two computations of the median, unless one is high by the older one


class RecordedValue(Struct, frozen=True):
    """Recorded value of a step."""

    step: int
    value: float
    is_high: bool


class Trend(Struct, frozen=True):
    """Judgement of the metrics that were recorded up to a save."""

    is_spiking: bool | None  # None if there are too few values
    detail: str  # the values that are too high, or why that is not known


class SpikeDetector:
    """Detector of spikes of one metric, fed with its values in order.

    High values are compared with the others, and do not join them until as many have come that they must be
    the new normal. So a spike does not hide the next one, and a lasting change is reported once.
    """

    def __init__(self, name: str, kind: str = "loss") -> None:
        self._name, self._ratio = name, _RATIO[kind]
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[RecordedValue] = deque(maxlen=NUM_RECENT)
        self._center, self._limit = math.nan, math.nan
        self._num_since, self._num_high = 0, 0
        self.first_high: RecordedValue | None = None
        """First of the high values of the present spike; None without one."""

    @property
    def is_spiking(self) -> bool | None:
        """True during a spike; None while there are too few values."""
        if len(self._usual) < MIN_VALUES and not self._is_lost():
            return None
        return self._is_lost() or sum(one.is_high for one in self._recent) >= NUM_HIGH

    def _is_lost(self) -> bool:
        """Return True if the newest values are not finite, however few there were before."""
        newest = list(self._recent)[-NUM_HIGH:]
        return len(newest) == NUM_HIGH and not any(math.isfinite(point.value) for point in newest)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        is_high = self._is_high(value)
        self._recent.append(RecordedValue(step, value, is_high))
        self._num_high = self._num_high + 1 if is_high else 0
        if not is_high:
            if math.isfinite(value):
                self._usual.append(value)
                self._num_since += 1
        elif self._num_high >= WINDOW and math.isfinite(value):  # the new normal
            self._usual.clear()
            self._recent.clear()
            self._num_high = 0
        if not self.is_spiking:
            self.first_high = None
        elif self.first_high is None:
            self.first_high = next(point for point in self._recent if point.is_high)

    def go_back(self) -> None:
        """Continue after training went back behind the present spike. The usual values stay."""
        self._recent.clear()
        self._num_high, self.first_high = 0, None

    def _is_high(self, value: float) -> bool:
        if not math.isfinite(value):
            return value != -math.inf
        if len(self._usual) < MIN_VALUES:
            return False
        if self._num_since >= _REFRESH or not math.isfinite(self._limit) or value > self._limit:
            self._num_since = 0
            self._center = statistics.median(self._usual)
            deviation = _MAD_TO_DEVIATION * statistics.median(abs(one - self._center) for one in self._usual)
            self._limit = self._center + max(_Z * deviation, self._ratio * abs(self._center))
        return value > self._limit

    def trend(self) -> Trend:
        """Return the judgement of the values so far."""
        if self.is_spiking is None:
            few = f"{self._name} has {len(self._usual)} values; at least {MIN_VALUES} are needed"
            return Trend(None, few)
        if not self.is_spiking:
            return Trend(False, f"{self._name} is within reason")
        high = (point for point in self._recent if point.is_high)
        worst = max(high, key=lambda point: math.inf if math.isnan(point.value) else point.value)
        usual = f", usually {self._center:.4g}" if math.isfinite(self._center) else ""
        return Trend(True, f"{self._name} is {worst.value:.4g} at step {worst.step}{usual}")


def kind_of(name: str) -> str | None:
    """Return the kind of a metric by its name: "loss", "norm" for norms of gradients, or None."""
    words = re.split("[-/._]", name.lower())
    if not {"val", "eval", "test", "valid"}.isdisjoint(words):
        return None  # recorded too rarely, and after other steps
    if words[-1] == "loss":
        return "loss"
    if words[-1] in ("norm", "gradnorm") and any(word.startswith("grad") for word in words):
        return "norm"
    return None
