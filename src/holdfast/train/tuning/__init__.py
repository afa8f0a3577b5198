"""Finds what slows a training step down by running a few real ones, and says what to change."""
