"""Metrics of checkpoints: a small document beside each has the values recorded for its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.history import Line, is_count, is_number, parse_lines
from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported


class SaveValues(Struct, frozen=True):
    """Metrics of a save by name, and the steps of those recorded for another step."""

    values: Mapping[str, float] = {}
    of_steps: Mapping[str, int] = {}


class MetricByCheckpoint(Struct, frozen=True):
    """Values of one metric, and the run's mode for its best checkpoints."""

    values: Mapping[CheckpointId, float]
    mode: str | None  # "min" or "max", as the newest checkpoint with a mode has it; None if none has

    def choose_mode(self, asked: str | None, metric: str) -> str:
        """Return the recorded mode, else the one that was asked for, else "min"."""
        if asked is not None and self.mode not in (None, asked):
            raise InvalidInput(
                f'The best checkpoint was asked for by mode="{asked}", but the run keeps its best '
                f'checkpoints by mode="{self.mode}" of {metric!r}. Nothing was read. Give '
                f'mode="{self.mode}" instead.',
                key=metric,
            )
        return self.mode or asked or "min"


def write_metrics(
    store: Store, writer: WriterId, step: int, metrics: SaveValues, modes: Mapping[str, str]
) -> None:
    """Write the metrics of a checkpoint durably, in place of those written before; see `run.Metrics`."""
    modes = {name: mode for name, mode in modes.items() if name in metrics.values}
    found = run.Metrics(writer.run, writer.attempt, step, metrics.values, metrics.of_steps, modes)
    store.put(names.metrics(step, writer.attempt), run.document(found))


def read_document(store: Store, checkpoint: CheckpointId) -> run.Metrics:
    """Return the metrics of a checkpoint; without values if none were recorded."""
    name = names.metrics(checkpoint.step, checkpoint.attempt)
    try:
        return run.parse(run.Metrics, store.get(name), name)
    except NotFound:
        return run.Metrics("", attempt=checkpoint.attempt, step=checkpoint.step, values={})


def read_metrics(store: Store, checkpoint: CheckpointId) -> dict[str, float]:
    """Return the values of a checkpoint by name; see `read_document`."""
    return dict(read_document(store, checkpoint).values)


def copy_metrics(source: Store, target: Store, checkpoint: CheckpointId) -> None:
    """Copy the metrics of a checkpoint, if it has any, to another tier, durably."""
    name = names.metrics(checkpoint.step, checkpoint.attempt)
    try:
        document = source.get(name)
    except NotFound:
        return
    target.put(name, document)


def read_values(store: Store, metric: str, found: Iterable[CheckpointId]) -> MetricByCheckpoint:
    """Return the values of one metric. Checkpoints without it are left out.

    A damaged document is treated as missing.
    """
    values: dict[CheckpointId, float] = {}
    modes: dict[CheckpointId, str] = {}
    for checkpoint in found:
        try:
            metrics = read_document(store, checkpoint)
        except (Corrupt, Unsupported):
            continue
        if metric in metrics.values:
            values[checkpoint] = metrics.values[metric]
        if metric in metrics.modes:
            modes[checkpoint] = metrics.modes[metric]
    return MetricByCheckpoint(values, modes[max(modes)] if modes else None)


_MAX_LOG_BYTES = 64 << 20
_MAX_ATTEMPTS = 64
"""Attempts whose logs are searched, the newest."""

Values = dict[int, dict[str, float]]
"""Values by name, by step."""
Metric = tuple[str, int, float]  # value of a training metric: its name, the step, the value


def read_recent_values(stores: Sequence[Store], line: Sequence[CheckpointId], num_steps: int) -> Values:
    """Return the values of the last steps before a checkpoint, in ascending order.

    What cannot be read is left out: the values only make a judgement possible sooner.

    Args:
        stores: the tiers, nearest first.
        line: the checkpoints that it continues, oldest first, and itself.
    """
    found: Values = {}
    bases = [-1, *(one.step for one in line)]
    for checkpoint, base in list(zip(line, bases, strict=False))[: -_MAX_ATTEMPTS - 1 : -1]:
        log = _read_log(stores, checkpoint.attempt)
        for event in parse_lines(reversed(log.splitlines()), "metrics"):
            for name, at, value in reversed(metric_values(event)):
                if base < at <= checkpoint.step:
                    found.setdefault(at, {}).setdefault(name, value)  # the last one of a step counts
            if len(found) > num_steps:
                break
        if len(found) > num_steps:
            break
    return {step: found[step] for step in sorted(found)[-num_steps:]}


def _read_log(stores: Sequence[Store], attempt: int) -> bytes:
    name = names.history(attempt, 0)
    for store in stores:
        try:
            num_bytes = store.size(name)
            if num_bytes is not None and num_bytes <= _MAX_LOG_BYTES:
                return store.get(name)
        except (Corrupt, Denied, NotFound, RetryLater):
            continue
    return b""


def metric_values(line: Line) -> list[Metric]:
    """Return the valid values of training metrics in a line, in its order."""
    steps, values = line.get("steps"), line.get("values")
    if not isinstance(steps, list) or not isinstance(values, dict):
        return []
    return [
        (name, step, float(value))
        for name, column in values.items()
        if isinstance(column, list)
        for step, value in zip(steps, column, strict=False)
        if is_count(step) and (value in ("nan", "inf", "-inf") or is_number(value))
    ]
