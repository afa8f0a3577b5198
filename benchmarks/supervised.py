"""The demo's training under `supervise`, for `standby.py`."""

import holdfast
from holdfast.cli.demo.training import main

if __name__ == "__main__":
    holdfast.supervise(main, max_restarts=1000)
