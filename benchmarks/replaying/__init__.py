"""Failure traces, replayed against real jobs: schedules, faults, and the training under test."""
