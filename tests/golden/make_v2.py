"""The checkpoint of format version 2, in which a rank has several regions of a tensor. Made once."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch

from adapters.regions import save_regions

STATE = {
    "w": torch.arange(40, dtype=torch.float32).reshape(10, 4),
    "b": torch.arange(10, dtype=torch.int16),
    "note": "several regions",
}
ROWS = [[(0, 2), (3, 6), (9, 10)], [(2, 3), (6, 9)]]

if __name__ == "__main__":
    socket.gethostname = lambda: "host"
    os.getpid = lambda: 1001
    target = Path(sys.argv[1])
    target.mkdir(parents=True)  # never over what is there
    save_regions(target / "several-regions", 3, STATE, ROWS)
