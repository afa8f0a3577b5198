"""GPUs of this machine, by their numbers in CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import re
from pathlib import Path

_DEVICES = Path("/dev")


def visible_gpus(devices: Path = _DEVICES) -> list[str]:
    """Return the numbers or ids of the GPUs that a job may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [word.strip() for word in chosen.split(",") if word.strip()]
    numbers = [
        found[1] for path in devices.glob("nvidia*") if (found := re.fullmatch(r"nvidia(\d+)", path.name))
    ]
    return sorted(numbers, key=int)
