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
    """Numbers of one name.

    Attributes:
        name: without the suffix of counters.
        help: its meaning.
        samples: values by their labels.
        unit: the last part of the name, if it is a unit.
        is_counter: it only grows, as long as the run's history is kept.
    """

    name: str
    help: str
    samples: tuple[tuple[Labels, float], ...]
    unit: str = ""
    is_counter: bool = False

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
    """Return the numbers of a run as OpenMetrics text.

    Args:
        summary: of the run.
        home: its home, which is a label of each number.
    """
    lines = [line for one in metric_families(summary, home) for line in one.lines()]
    return "\n".join([*lines, "# EOF", ""])


def metric_families(summary: RunSummary, home: str) -> list[MetricFamily]:
    """Return the numbers of a run; unknown ones are left out."""
    label = {"home": home}
    found = [*_progress(summary, label), *_events(summary, label), *_times(summary, label)]
    return [one for one in found if one.samples]


def goodput(summary: RunSummary) -> float | None:
    """Return the share of the time that was training which counts; None before the first event."""
    whole_s = summary.times.total_s - summary.times.idle_s
    return summary.times.kept_s / whole_s if whole_s > 0 else None


def _progress(summary: RunSummary, label: Labels) -> list[MetricFamily]:
    newest = summary.attempts[-1] if summary.attempts else None
    contents = summary.home_contents
    return [
        MetricFamily(
            "holdfast_step",
            "Newest recorded step of the newest attempt.",
            _known(label, None if newest is None else newest.last_step),
        ),
        MetricFamily(
            "holdfast_checkpoint_step",
            "Step of the newest checkpoint in home.",
            _known(label, None if contents is None else contents.newest_step),
        ),
        MetricFamily(
            "holdfast_checkpoints",
            "Checkpoints in home.",
            _known(label, None if contents is None else contents.num_checkpoints),
        ),
        MetricFamily("holdfast_finished", "1 if the run has finished.", ((label, bool(summary.finished)),)),
        MetricFamily(
            "holdfast_last_event_timestamp_seconds",
            "Time of the last event of the training.",
            _known(label, summary.last_unix_s),
            unit="seconds",
        ),
    ]


def _events(summary: RunSummary, label: Labels) -> list[MetricFamily]:
    newest = summary.attempts[-1].number if summary.attempts else 0
    outcomes = Counter(
        "durable" if save.durable else str(save.outcome or "under way") for save in summary.saves
    )
    kinds = Counter(one.kind for one in summary.interruptions)
    slow = [
        one.period for one in summary.slow_periods if one.attempt == newest and not one.period.until_unix_s
    ]
    restores = sum(one.restored_step is not None for one in summary.attempts)
    lost = sum(one.steps_lost for one in summary.interruptions)
    return [
        _counter("holdfast_attempts", "Starts of the run.", ((label, len(summary.attempts)),)),
        MetricFamily(
            "holdfast_saves",
            "Saves by their outcome.",
            tuple(({**label, "outcome": one}, number) for one, number in sorted(outcomes.items())),
        ),
        _counter("holdfast_restores", "Attempts that restored a checkpoint.", ((label, restores),)),
        _counter(
            "holdfast_interruptions",
            "Interruptions by their kind.",
            tuple(({**label, "kind": one}, number) for one, number in sorted(kinds.items())),
        ),
        _counter("holdfast_steps_lost", "Steps known to be repeated.", ((label, lost),)),
        _counter("holdfast_hangs", "Hangs that were reported.", ((label, len(summary.hangs)),)),
        _counter(
            "holdfast_unhealthy_checkpoints",
            "Checkpoints of states that are not healthy.",
            ((label, len(summary.unhealthy)),),
        ),
        _counter(
            "holdfast_slow_periods",
            "Periods in which all ranks waited for one.",
            ((label, len(summary.slow_periods)),),
        ),
        MetricFamily(
            "holdfast_slow_rank_factor",
            "Own time of each rank that is slow now, as a multiple of that of a usual rank.",
            tuple(({**label, "rank": str(one.rank), "host": one.host}, one.factor) for one in slow),
        ),
        MetricFamily(
            "holdfast_slow_rank_cost_ratio",
            "Share of the time that all lose by slow ranks now.",
            ((label, max((one.cost_share for one in slow), default=0.0)),),
            unit="ratio",
        ),
    ]


def _times(summary: RunSummary, label: Labels) -> list[MetricFamily]:
    parts = {name.removesuffix("_s"): seconds for name, seconds in asdict(summary.times).items()}
    del parts["total"]
    return [
        MetricFamily(
            "holdfast_time_seconds",
            "Time since the first start, by what it was.",
            tuple(({**label, "part": part}, seconds) for part, seconds in parts.items()),
            unit="seconds",
        ),
        MetricFamily(
            "holdfast_goodput_ratio",
            "Training that counts, as a share of the time that was meant for training.",
            _known(label, goodput(summary)),
            unit="ratio",
        ),
        MetricFamily(
            "holdfast_save_blocked_seconds",
            "Mean time for which a save blocked the training.",
            _known(label, summary.advice.cost_s),
            unit="seconds",
        ),
        MetricFamily(
            "holdfast_mean_time_between_failures_seconds",
            "Training time per failure.",
            _known(label, summary.advice.mtbf_s),
            unit="seconds",
        ),
    ]


def _counter(name: str, text: str, samples: tuple[tuple[Labels, float], ...]) -> MetricFamily:
    return MetricFamily(name, text, samples, is_counter=True)


def _known(label: Labels, value: float | None) -> tuple[tuple[Labels, float], ...]:
    return () if value is None else ((label, value),)


def _number(value: float) -> str:
    value = float(value)
    return (
        str(int(value))
        if value.is_integer() and abs(value) < 1e15
        else repr(value)
        if math.isfinite(value)
        else "NaN"
    )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
