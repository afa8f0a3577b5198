"""Experiment trackers: W&B, MLflow and TensorBoard get one curve per run, with its saves and goodput."""

from holdfast.adapters.trackers.libraries import attach_mlflow, attach_tensorboard, attach_wandb
from holdfast.adapters.trackers.tracker import Tracker

__all__ = ["Tracker", "attach_mlflow", "attach_tensorboard", "attach_wandb"]
