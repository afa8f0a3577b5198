"""Crash states: what a power cut or a kill may leave of a recorded workload, and what each state restores."""
