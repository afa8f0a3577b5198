"""Watches of a run: hangs, slow ranks, values, compiled code, preemption; and their report."""
