"""Preemption notices from signals, files and the metadata services of clouds."""
