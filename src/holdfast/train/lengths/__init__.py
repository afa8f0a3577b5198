"""Batches of sequences of unequal length: what padding wastes, and the buckets and packs that waste less."""

from holdfast.train.lengths.batches import Batches
from holdfast.train.lengths.buckets import BucketBatches
from holdfast.train.lengths.packs import PackedBatches, first_fit
from holdfast.train.lengths.padding import Padding, compare_paddings, say_paddings
from holdfast.train.lengths.rows import PackedRows, attention_mask, cumulative_lengths, join_sequences

__all__ = [
    "Batches",
    "BucketBatches",
    "PackedBatches",
    "PackedRows",
    "Padding",
    "attention_mask",
    "compare_paddings",
    "cumulative_lengths",
    "first_fit",
    "join_sequences",
    "say_paddings",
]
