"""The training kit: functions for use inside a training loop of one's own; no trainer, no config file."""
