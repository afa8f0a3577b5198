"""The batch size that fits in memory and reaches full throughput, found by measuring."""

from holdfast.train.batch.finder import fit_batch
from holdfast.train.batch.result import BatchFit, Probe

__all__ = ["BatchFit", "Probe", "fit_batch"]
