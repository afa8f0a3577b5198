"""Live numbers of a run as OpenMetrics text, for Prometheus and what reads its formats; pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from holdfast.system.documents import to_plain
from holdfast.watch.report.summary import RunSummary

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Labels = Mapping[str, str]
Values = float | None | Sequence[tuple[Labels, float]]
"""Value without labels, None if it is not known, or values by their labels."""


class MetricFamily(Struct, frozen=True):
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
            number = float(value) if math.isfinite(value) else "NaN"
            if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
                number = int(number)
            yield f"{name}{{{inside}}} {number}"


def format_metrics(summary: RunSummary, home: str) -> str:
    """Return the numbers of a run as OpenMetrics text; `home` is a label of each."""
    lines = [line for one in metric_families(summary, home) for line in one.lines()]
    return "\n".join([*lines, "# EOF", ""])


def metric_families(summary: RunSummary, home: str) -> Iterator[MetricFamily]:
    """Yield the numbers of a run; unknown ones are left out."""
    for name, text, values in _families(summary):
        rows = values if isinstance(values, Sequence) else [] if values is None else [({}, values)]
        samples = tuple(({"home": home, **labels}, value) for labels, value in rows)
        stem, _, end = name.rpartition("_")
        if samples:
            is_counter, unit = end == "total", end if end in ("seconds", "ratio") else ""
            whole = f"holdfast_{stem if is_counter else name}"
            yield MetricFamily(whole, text, samples, unit, is_counter)


def _families(summary: RunSummary) -> Iterator[tuple[str, str, Values]]:
    """Yield name, help and values of each family. The end of a name is a unit, or "total" for a counter."""
    newest, held, advice = summary.attempts[-1:], summary.home_contents, summary.advice
    step = newest[0].last_step if newest else None
    yield "step", "Newest recorded step of the newest attempt.", step
    yield "checkpoint_step", "Step of the newest checkpoint in home.", held and held.newest_step
    yield "checkpoints", "Checkpoints in home.", None if held is None else held.num_checkpoints
    yield "finished", "1 if the run has finished.", bool(summary.finished)
    yield "last_event_timestamp_seconds", "Time of the last event of the training.", summary.last_unix_s

    outcomes = ("durable" if save.durable else str(save.outcome or "under way") for save in summary.saves)
    restores = sum(one.restored_step is not None for one in summary.attempts)
    lost = sum(one.steps_lost for one in summary.interruptions)
    number = newest[0].number if newest else 0
    slow = [one for attempt, one in summary.slow_periods if attempt == number and not one.until_unix_s]
    yield "attempts_total", "Starts of the run.", len(summary.attempts)
    yield "saves", "Saves by their outcome.", _counts("outcome", outcomes)
    yield "restores_total", "Attempts that restored a checkpoint.", restores
    kinds = _counts("kind", (one.kind for one in summary.interruptions))
    yield "interruptions_total", "Interruptions by their kind.", kinds
    yield "steps_lost_total", "Steps known to be repeated.", lost
    yield "hangs_total", "Hangs that were reported.", len(summary.hangs)
    unhealthy = "Checkpoints of states that are not healthy."
    yield "unhealthy_checkpoints_total", unhealthy, len(summary.unhealthy)
    yield "slow_periods_total", "Periods in which all ranks waited for one.", len(summary.slow_periods)
    factor = "Own time of each rank that is slow now, as a multiple of that of a usual rank."
    factors = [({"rank": str(one.rank), "host": one.host}, one.factor) for one in slow]
    yield "slow_rank_factor", factor, factors
    cost = max((one.cost_share for one in slow), default=0.0)
    yield "slow_rank_cost_ratio", "Share of the time that all lose by slow ranks now.", cost

    times = {name.removesuffix("_s"): seconds for name, seconds in to_plain(summary.times).items()}
    parts = [({"part": part}, seconds) for part, seconds in times.items() if part != "total"]
    yield "time_seconds", "Time since the first start, by what it was.", parts
    share = "Training that counts, as a share of the time that was meant for training."
    yield "goodput_ratio", share, summary.times.goodput
    yield "save_blocked_seconds", "Mean time for which a save blocked the training.", advice.cost_s
    yield "mean_time_between_failures_seconds", "Training time per failure.", advice.mtbf_s


def _counts(key: str, labels: Iterable[str]) -> list[tuple[Labels, float]]:
    """Return the number of occurrences of each value of a label."""
    return [({key: label}, number) for label, number in sorted(Counter(labels).items())]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
