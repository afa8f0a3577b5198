"""Run of MLflow: found again by a tag, with what it has as the truth about steps that are done again."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, final

from typing_extensions import override

from holdfast.adapters.trackers.tracker import NONE, NewestSteps, RowPlace, TrackedRun, Tracker
from holdfast.checkpoint.run import Checkpointer
from holdfast.errors import Unsupported

TAG = "holdfast.run"
"""Tag with the id of Holdfast's run."""


def attach_mlflow(
    ckpt: Checkpointer,
    *,
    experiment: str = "Default",
    tracking_uri: str | None = None,
    run_name: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> Tracker:
    """Return a tracker that logs to one run of MLflow through all restarts.

    Args:
        ckpt: Checkpointer of the training.
        experiment: name of the experiment, which is created if it does not exist.
        tracking_uri: place or server of MLflow; by default that of its environment.
        run_name: name of a new run.
        params: parameters of a new run.
    """
    try:
        mlflow = importlib.import_module("mlflow")
    except ImportError as error:
        raise Unsupported(
            f"attach_mlflow() needs mlflow: {error}. Run: pip install mlflow, or mlflow-skinny."
        ) from error
    return Tracker(ckpt, _MlflowRun(mlflow, experiment, tracking_uri, run_name, params or {}), name="MLflow")


@final
class _MlflowRun(TrackedRun):
    """Run of MLflow, through its client only: a run that the script has active stays as it is."""

    def __init__(
        self, mlflow: Any, experiment: str, uri: str | None, name: str | None, params: Mapping[str, Any]
    ) -> None:
        self._mlflow, self._experiment, self._uri = mlflow, experiment, uri
        self._name, self._params = name, params
        self._client: Any = None
        self._run = ""
        self._newest = NewestSteps(self._read_newest)

    @override
    def begin(self, place: RowPlace) -> None:
        if not self._run:
            self._client = self._mlflow.MlflowClient(self._uri)
            self._run = self._find(place.run)
        self._newest.begin(place.attempt)

    def _find(self, run: str) -> str:
        """Return the id of MLflow's run, which is made at the first start."""
        client = self._client
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            number = client.create_experiment(self._experiment)
        found = client.search_runs([number], filter_string=f"tags.`{TAG}` = '{run}'", max_results=1)
        if found:
            client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0].info.run_id
        made = client.create_run(number, tags={TAG: run}, run_name=self._name).info.run_id
        for name, value in self._params.items():
            client.log_param(made, name, value)
        return made

    def _read_newest(self, name: str) -> int:
        return max((one.step for one in self._client.get_metric_history(self._run, name)), default=NONE)

    @override
    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        if new := self._newest.take(place.step, values):
            now_ms = int(time.time() * 1000)
            metric = self._mlflow.entities.Metric
            self._client.log_batch(
                self._run, metrics=[metric(name, value, now_ms, place.step) for name, value in new.items()]
            )

    @override
    def end(self, *, has_failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if has_failed else "FINISHED")
