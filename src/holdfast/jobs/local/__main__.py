"""Entry of the controllers of local jobs: `python -m holdfast.jobs.local ROLE FOLDER`; not for people."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.jobs.node import locks


def main() -> None:
    """Look after the job of this folder; the lock that says so was handed to us."""
    folder = Path(sys.argv[2])
    os.chdir("/")  # hold nobody's directory
    locks.keep_handed()
    from holdfast.jobs.local.controller import look_after

    look_after(folder.parents[1], int(folder.name))


if __name__ == "__main__":
    main()
