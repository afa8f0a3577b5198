"""Pauses between retries: growing with the number of failures or the time they last, and random; pure."""

from __future__ import annotations

import random

_MAX_DOUBLINGS = 60  # more would only overflow
_dice = random.Random()  # our own: training must not see other random numbers


def doubled(num_failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause after so many failures in a row: `first_s`, doubled with each further one."""
    return min(first_s * 2.0 ** min(max(num_failures - 1, 0), _MAX_DOUBLINGS), longest_s)


def proportional(elapsed_s: float, share: float, first_s: float, longest_s: float) -> float:
    """Return a share of the time that has passed, within `first_s` and `longest_s`."""
    return min(max(share * elapsed_s, first_s), longest_s)


def jittered(pause_s: float) -> float:
    """Return a random pause between half of `pause_s` and all of it.

    Several ranks whose requests fail together then do not retry together.
    """
    return _dice.uniform(0.5, 1.0) * pause_s
