"""The batch size that fits in memory and reaches full throughput, found by measuring."""

from holdfast.train.batch.finder import Search, fit_batch
from holdfast.train.batch.learning_rates import (
    Accumulation,
    ScaledRate,
    format_rates,
    plan_accumulation,
    scale_rates,
)
from holdfast.train.batch.result import BatchFit, Probe, choose_size
from holdfast.train.batch.step_cost import estimate_peak

__all__ = [
    "Accumulation",
    "BatchFit",
    "Probe",
    "ScaledRate",
    "Search",
    "choose_size",
    "estimate_peak",
    "fit_batch",
    "format_rates",
    "plan_accumulation",
    "scale_rates",
]
