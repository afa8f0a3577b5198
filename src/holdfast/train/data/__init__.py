"""Data whose position is part of the state: shuffled batches that resume on any number of ranks."""

from holdfast.train.data.batches import Batches, GlobalBatches

__all__ = ["Batches", "GlobalBatches"]
