"""The training kit: functions for inside one's own training loop, with no trainer around it."""
