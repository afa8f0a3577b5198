"""Watch of the recorded metrics: the loss and the norms of gradients, each with a detector of spikes."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint.format.health import Trend
from holdfast.watch.values.spikes import RecordedValue, SpikeDetector, kind_of

_MAX_METRICS = 8


class SpikeWatch:
    """Detectors of the metrics whose names are those of losses and of norms of gradients."""

    def __init__(self) -> None:
        self._detectors: dict[str, SpikeDetector] = {}

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step. Steps ascend; metrics of other names are ignored."""
        for name, value in values.items():
            detector = self._detectors.get(name)
            if detector is None:
                kind = kind_of(name)
                if kind is None or len(self._detectors) >= _MAX_METRICS:
                    continue
                detector = self._detectors[name] = SpikeDetector(name, kind)
            detector.add(step, value)

    def go_back(self) -> None:
        """Continue after training went back behind the present spikes."""
        for one in self._detectors.values():
            one.go_back()

    @property
    def spike(self) -> RecordedValue | None:
        """First value of a spike that has not ended; None without one."""
        found = [one.first_high for one in self._detectors.values() if one.first_high is not None]
        return min(found, key=lambda point: point.step, default=None)

    def trend(self) -> Trend | None:
        """Return the judgement of all metrics together; None if none is watched."""
        trends = [one.trend() for one in self._detectors.values()]
        if not trends:
            return None
        for outcome in (True, False):
            found = [one.detail for one in trends if one.is_spiking is outcome]
            if found:
                return Trend(outcome, "; ".join(found))
        return Trend(None, "; ".join(one.detail for one in trends))
