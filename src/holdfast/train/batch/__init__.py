"""The batch that fits and the batch that pays: found by measuring, agreed by all ranks, changing nothing."""

from holdfast.train.batch.estimate import estimate_peak
from holdfast.train.batch.finder import fit_batch
from holdfast.train.batch.fit import BatchFit, Probe, choose_batch
from holdfast.train.batch.rates import (
    Accumulation,
    ScaledRate,
    accumulate_to,
    say_rates,
    scale_rates,
)
from holdfast.train.batch.search import Search

__all__ = [
    "Accumulation",
    "BatchFit",
    "Probe",
    "ScaledRate",
    "Search",
    "accumulate_to",
    "choose_batch",
    "estimate_peak",
    "fit_batch",
    "say_rates",
    "scale_rates",
]
