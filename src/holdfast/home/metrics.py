"""Metrics of checkpoints: a small document beside each has the values recorded for its step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.format import names, run
from holdfast.home.listing import CheckpointId
from holdfast.home.writer import WriterId
from holdfast.store.contract import Store


def write_metrics(store: Store, writer: WriterId, step: int, values: Mapping[str, float]) -> None:
    """Write the metrics of a checkpoint, in place of those written before.

    Raises:
        RetryLater: the store failed.

    Blocks: until they are durable.
    """
    metrics = run.Metrics(writer.run, writer.attempt, step, values)
    store.put(names.metrics(step, writer.attempt), run.document(metrics))


def read_metrics(store: Store, step: int, attempt: int) -> dict[str, float]:
    """Return the metrics of a checkpoint by name; {} if none were recorded.

    Raises:
        Corrupt: the document is damaged.
        Unsupported: it was written by a newer format.
        RetryLater: the store failed.
    """
    name = names.metrics(step, attempt)
    try:
        return dict(run.parse(run.Metrics, store.get(name), name).values)
    except NotFound:
        return {}


def copy_metrics(source: Store, target: Store, step: int, attempt: int) -> None:
    """Copy the metrics of a checkpoint, if it has any, to another tier.

    Raises:
        RetryLater: a store failed.

    Blocks: until they are durable.
    """
    name = names.metrics(step, attempt)
    try:
        document = source.get(name)
    except NotFound:
        return
    target.put(name, document)


def read_values(store: Store, metric: str, found: Iterable[CheckpointId]) -> dict[CheckpointId, float]:
    """Return the value of one metric by checkpoint. Those without it are left out.

    A damaged document is treated as missing.

    Raises:
        RetryLater: the store failed.
    """
    values: dict[CheckpointId, float] = {}
    for attempt, step in found:
        try:
            metrics = read_metrics(store, step, attempt)
        except (Corrupt, Unsupported):
            continue
        if metric in metrics:
            values[attempt, step] = metrics[metric]
    return values
