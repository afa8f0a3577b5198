"""Line in a node's log, from the processes of its mounts."""

from __future__ import annotations

import sys
import time


def log_line(text: str) -> None:
    """Write a line to the log of the node that started this process."""
    sys.stdout.write(f"holdfast: {time.strftime('%F %T')} {text}\n")
    sys.stdout.flush()
