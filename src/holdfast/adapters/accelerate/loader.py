"""Data loaders of an Accelerator whose pass over the data can be continued exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.adapters.accelerate.batch_position import BatchPosition, batches_of
from holdfast.adapters.accelerate.data_position import DataPosition, UnpreparedGenerators
from holdfast.adapters.accelerate.session import end_preempted
from holdfast.adapters.kit.attachment import insert_class, warn_of_persistent_workers


class PositionedLoader:
    """Part of a prepared loader's class that records and continues its passes.

    Attributes:
        holdfast_position: position, which a loader without the first batches shares with its origin.
        holdfast_origin: loader that the first batches were left out of; None for a whole one.
        holdfast_continues: this loader continues the pass of a checkpoint, if it has one.
    """

    holdfast_position: DataPosition
    holdfast_origin: Any = None
    holdfast_continues = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of a pass.

        Generators that a pass draws from when it begins, for the order of the data, are set to their states
        at the beginning of the pass that it continues, and set back before the first batch.
        """
        position = self.holdfast_position
        now = position.begin(self)
        num_batches = 0
        try:
            for batch in super().__iter__():  # pyright: ignore
                if num_batches == 0:
                    position.set_back(now)
                num_batches += 1
                if position.give(num_batches):
                    yield batch
        except GeneratorExit:
            position.leave()  # by `break`
            raise
        except Exception as error:
            end_preempted(error)
            raise
        if num_batches == 0:
            position.set_back(now)
        position.end(self, is_empty=num_batches == 0)


def add_position(loader: Any, before: UnpreparedGenerators | None = None) -> Any:
    """Have a prepared loader record its position. Returns the same loader.

    Args:
        loader: the loader.
        before: generators before it was prepared; None if that was before `attach`.
    """
    if not isinstance(_position_of(loader), DataPosition):
        insert_class(loader, PositionedLoader, before=type(loader))
        batches = batches_of(loader)
        loader.holdfast_position = (
            DataPosition(loader, before) if batches is None else BatchPosition(loader, batches)
        )
        if getattr(loader, "persistent_workers", False) and loader.generator is None:
            warn_of_persistent_workers("persistent_workers")
    return loader


def follow_position(loader: Any, origin: Any, *, continues: bool) -> Any:
    """Share the position of a whole loader with one without its first batches. Returns the latter.

    Args:
        loader: loader without the first batches.
        origin: the whole loader; one without a position is left as it is.
        continues: it may continue the pass of a checkpoint.
    """
    position = _position_of(origin)
    if isinstance(position, DataPosition) and hasattr(loader, "iteration"):
        insert_class(loader, PositionedLoader, before=type(loader))
        loader.holdfast_position, loader.holdfast_origin = position, origin
        loader.holdfast_continues = continues
    return loader


def _position_of(loader: Any) -> Any:
    return vars(loader).get("holdfast_position")
