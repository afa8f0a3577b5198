"""Batches of sequences of unequal length: the cost of padding, buckets and packed rows."""

from holdfast.train.data.batches import Batches
from holdfast.train.lengths.batches import (
    BucketBatches,
    PackedBatches,
    Padding,
    compare_paddings,
    first_fit,
    format_paddings,
)
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
    "format_paddings",
    "join_sequences",
]
