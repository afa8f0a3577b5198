"""Pace of the ranks: which of them the others wait for, step after step, and how much that costs."""
