"""Live numbers of a run as OpenMetrics text, for Prometheus and what reads its formats; pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from holdfast.watch.report.summary import RunSummary

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Numbers of one name."""

    name: str  # without the suffix of counters
    help: str
    samples: tuple[tuple[Labels, float], ...]  # values by their labels
    unit: str = ""  # the last part of the name, if it is a unit
    is_counter: bool = False  # it only grows, as long as the run's history is kept

    def lines(self) -> Iterable[str]:
        """Yield its lines.

        Source: the OpenMetrics specification 1.0.0, text format.
        """
        yield f"# TYPE {self.name} {'counter' if self.is_counter else 'gauge'}"
        if self.unit:
            yield f"# UNIT {self.name} {self.unit}"
        yield f"# HELP {self.name} {_escaped(self.help)}"
        for labels, value in self.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            name = f"{self.name}_total" if self.is_counter else self.name
            yield f"{name}{{{inside}}} {_number(value)}"


def format_metrics(summary: RunSummary, home: str) -> str:
    """Return the numbers of a run as OpenMetrics text; `home` is a label of each."""
    lines = [line for one in metric_families(summary, home) for line in one.lines()]
    return "\n".join([*lines, "# EOF", ""])


def metric_families(summary: RunSummary, home: str) -> list[MetricFamily]:
    """Return the numbers of a run; unknown ones are left out."""
    found = _Families(summary, home)
    return [one for one in (*found.progress(), *found.events(), *found.times()) if one.samples]


def goodput(summary: RunSummary) -> float | None:
    """Return the share of the time that was training which counts; None before the first event."""
    whole_s = summary.times.total_s - summary.times.idle_s
    return summary.times.kept_s / whole_s if whole_s > 0 else None


class _Families:
    """Maker of the families of one run."""

    def __init__(self, summary: RunSummary, home: str) -> None:
        self._summary, self._label = summary, {"home": home}
        self._newest = summary.attempts[-1] if summary.attempts else None

    def progress(self) -> list[MetricFamily]:
        summary, held = self._summary, self._summary.home_contents
        step = None if self._newest is None else self._newest.last_step
        newest, number = (None, None) if held is None else (held.newest_step, held.num_checkpoints)
        last_s = summary.last_unix_s
        return [
            self._one("step", "Newest recorded step of the newest attempt.", step),
            self._one("checkpoint_step", "Step of the newest checkpoint in home.", newest),
            self._one("checkpoints", "Checkpoints in home.", number),
            self._one("finished", "1 if the run has finished.", bool(summary.finished)),
            self._one("last_event_timestamp", "Time of the last event of the training.", last_s, "seconds"),
        ]

    def events(self) -> list[MetricFamily]:
        summary = self._summary
        outcomes = ("durable" if save.durable else str(save.outcome or "under way") for save in summary.saves)
        kinds = (one.kind for one in summary.interruptions)
        newest = self._newest.number if self._newest is not None else 0
        slow = [
            one.period
            for one in summary.slow_periods
            if one.attempt == newest and not one.period.until_unix_s
        ]
        factors = tuple(
            ({**self._label, "rank": str(one.rank), "host": one.host}, one.factor) for one in slow
        )
        cost = max((one.cost_share for one in slow), default=0.0)
        restores = sum(one.restored_step is not None for one in summary.attempts)
        lost = sum(one.steps_lost for one in summary.interruptions)
        unhealthy, periods = len(summary.unhealthy), len(summary.slow_periods)
        return [
            self._count("attempts", "Starts of the run.", len(summary.attempts)),
            self._by("saves", "Saves by their outcome.", "outcome", outcomes),
            self._count("restores", "Attempts that restored a checkpoint.", restores),
            self._by("interruptions", "Interruptions by their kind.", "kind", kinds, is_counter=True),
            self._count("steps_lost", "Steps known to be repeated.", lost),
            self._count("hangs", "Hangs that were reported.", len(summary.hangs)),
            self._count("unhealthy_checkpoints", "Checkpoints of states that are not healthy.", unhealthy),
            self._count("slow_periods", "Periods in which all ranks waited for one.", periods),
            MetricFamily(
                "holdfast_slow_rank_factor",
                "Own time of each rank that is slow now, as a multiple of that of a usual rank.",
                factors,
            ),
            self._one("slow_rank_cost", "Share of the time that all lose by slow ranks now.", cost, "ratio"),
        ]

    def times(self) -> list[MetricFamily]:
        advice = self._summary.advice
        parts = {name.removesuffix("_s"): seconds for name, seconds in asdict(self._summary.times).items()}
        del parts["total"]
        return [
            MetricFamily(
                "holdfast_time_seconds",
                "Time since the first start, by what it was.",
                tuple(({**self._label, "part": part}, seconds) for part, seconds in parts.items()),
                "seconds",
            ),
            self._one(
                "goodput",
                "Training that counts, as a share of the time that was meant for training.",
                goodput(self._summary),
                "ratio",
            ),
            self._one(
                "save_blocked", "Mean time for which a save blocked the training.", advice.cost_s, "seconds"
            ),
            self._one("mean_time_between_failures", "Training time per failure.", advice.mtbf_s, "seconds"),
        ]

    def _one(self, name: str, text: str, value: float | None, unit: str = "") -> MetricFamily:
        """Return a family with one value; without a sample if it is None."""
        samples = () if value is None else ((self._label, value),)
        return MetricFamily("_".join(filter(None, ("holdfast", name, unit))), text, samples, unit)

    def _count(self, name: str, text: str, value: float) -> MetricFamily:
        return MetricFamily(f"holdfast_{name}", text, ((self._label, value),), is_counter=True)

    def _by(
        self, name: str, text: str, key: str, labels: Iterable[str], *, is_counter: bool = False
    ) -> MetricFamily:
        """Return a family with the number of occurrences of each value of a label."""
        counts = sorted(Counter(labels).items())
        samples = tuple(({**self._label, key: label}, number) for label, number in counts)
        return MetricFamily(f"holdfast_{name}", text, samples, is_counter=is_counter)


def _number(value: float) -> str:
    value = float(value)
    if not math.isfinite(value):
        return "NaN"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
