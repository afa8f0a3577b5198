"""Metrics of checkpoints: a small document beside each has the values recorded for its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.writer import WriterId
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SaveValues:
    """Metrics of a save by name, and the steps of those recorded for another step."""

    values: Mapping[str, float] = field(default_factory=dict[str, float])
    of_steps: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class MetricByCheckpoint:
    """Values of one metric, and the run's mode for its best checkpoints.

    Attributes:
        values: by checkpoint.
        mode: "min" or "max", as the newest checkpoint with a mode has it; None if none has.
    """

    values: Mapping[CheckpointId, float]
    mode: str | None

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
    store: Store,
    writer: WriterId,
    step: int,
    values: Mapping[str, float],
    *,
    of_steps: Mapping[str, int] = _NOTHING,
    modes: Mapping[str, str] = _NOTHING,
) -> None:
    """Write the metrics of a checkpoint, in place of those written before.

    Args:
        of_steps: the step of each value that was recorded for another one.
        modes: "min" or "max" for the metric by which the run keeps its best checkpoints.

    Blocks: until they are durable.
    """
    modes = {name: mode for name, mode in modes.items() if name in values}
    metrics = run.Metrics(writer.run, writer.attempt, step, values, of_steps, modes)
    store.put(names.metrics(step, writer.attempt), run.document(metrics))


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
    """Copy the metrics of a checkpoint, if it has any, to another tier.

    Blocks: until they are durable.
    """
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
    for one in found:
        try:
            metrics = read_document(store, one)
        except (Corrupt, Unsupported):
            continue
        if metric in metrics.values:
            values[one] = metrics.values[metric]
        if metric in metrics.modes:
            modes[one] = metrics.modes[metric]
    return MetricByCheckpoint(values, modes[max(modes)] if modes else None)
