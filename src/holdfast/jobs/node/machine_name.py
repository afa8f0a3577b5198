"""Name of this machine in the list of nodes."""

from __future__ import annotations

import os
import socket


def machine_name() -> str:
    """Return the name of this machine, in a job of Slurm that of the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
