"""Name of this machine in the list of nodes."""

from __future__ import annotations

import os
import socket


def machine_name() -> str:
    """Return the name of this machine, in Slurm if this process belongs to one of its jobs."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
