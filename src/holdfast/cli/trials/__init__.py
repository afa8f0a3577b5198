"""Trials of a training script, for `holdfast check` and `holdfast replay`: runs, traces and comparison."""
