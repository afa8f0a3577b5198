"""Experiment trackers: W&B, MLflow and TensorBoard get one curve per run, with its saves and goodput."""

from holdfast.adapters.trackers.event_files import attach_tensorboard
from holdfast.adapters.trackers.mlflow_run import attach_mlflow
from holdfast.adapters.trackers.tracker import Tracker
from holdfast.adapters.trackers.wandb_run import attach_wandb

__all__ = ["Tracker", "attach_mlflow", "attach_tensorboard", "attach_wandb"]
