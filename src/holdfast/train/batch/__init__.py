"""The batch size that fits in memory and reaches full throughput, found by measuring."""

from holdfast.train.batch.finder import Search, fit_batch
from holdfast.train.batch.result import (
    Accumulation,
    BatchFit,
    Probe,
    ScaledRate,
    choose_size,
    format_rates,
    plan_accumulation,
    scale_rates,
)

__all__ = [
    "Accumulation",
    "BatchFit",
    "Probe",
    "ScaledRate",
    "Search",
    "choose_size",
    "fit_batch",
    "format_rates",
    "plan_accumulation",
    "scale_rates",
]
