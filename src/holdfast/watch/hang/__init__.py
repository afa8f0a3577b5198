"""Hang watchdog: a trainer's progress in shared memory, its learnt limit, stacks of all ranks. No torch."""
