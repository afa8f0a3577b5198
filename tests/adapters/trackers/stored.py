"""Readers of what trackers have stored: the curves by name, as (step, value) in the order of logging."""

from __future__ import annotations

from pathlib import Path

import pytest

Curves = dict[str, list[tuple[int, float]]]


def read(library: str, folder: Path) -> Curves:
    """Return the curves that a library has stored in a folder."""
    return {"mlflow": _read_mlflow, "tensorboard": _read_tensorboard}[library](folder)


def _read_mlflow(folder: Path) -> Curves:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(folder.as_uri())
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert len(runs) <= 1
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for run in runs
        for name in run.data.metrics
    }


def _read_tensorboard(folder: Path) -> Curves:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        name: [(one.step, one.value) for one in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }
